"""A number hidden in prose is still found after the cut, by the policies that should find it.

Greedy decoding on SmolLM2; the model answers in its own words, so the number has to survive a
lead-in of ten tokens and more. `--samples 20` runs the whole measurement, the default is 8.
"""

from __future__ import annotations

import pydoc_data.topics
import random
import re

import pytest

from pyinertia import Llama

N_TOKENS, BUDGET, N_ANSWER = 900, 256, 24
QUESTION = "What is the special magic number mentioned in the provided text?"


def sentences() -> list[str]:
    """Plain prose without numbers or markup."""
    text = " ".join(text for _, text in sorted(pydoc_data.topics.topics.items()))
    parts = (part.strip() + "." for part in " ".join(text.split()).split(". "))
    return [
        part
        for part in parts
        if 40 < len(part) < 200
        and re.fullmatch(r"[\w ,.;:()'-]+", part)
        and not re.search(r"[\d_]", part)
    ]


def sample(llm: Llama, seed: int) -> tuple[list[int], str]:
    """Prompt tokens and the 5-digit number they hide at a random depth."""
    rng = random.Random(seed)
    number = str(rng.randrange(10_000, 100_000))
    body, n = [], 0
    for sentence in rng.sample(PROSE, len(PROSE)):
        n += len(llm.tokenize(sentence.encode(), add_bos=False))
        if n > N_TOKENS - 80:
            break
        body.append(sentence)
    body.insert(rng.randrange(1, len(body)), f"The special magic number is {number}.")
    prompt = (
        "<|im_start|>user\nRead the text and answer the question.\n\n"
        f"{' '.join(body)}\n\n{QUESTION}<|im_end|>\n<|im_start|>assistant\n"
    )
    return llm.tokenize(prompt.encode(), special=True), number


PROSE = sentences()


@pytest.fixture(scope="module")
def recall(smollm2, request):
    """Which samples a policy answers: recall(policy) -> list[bool].

    With /bounded behind its name the prompt is cut while it enters, ranked by its own end, with
    /bounded/query by the question, with /bounded/blind by neither.
    """
    n_samples = request.config.getoption("--samples")
    found: dict[str, list[bool]] = {}

    def measure(policy: str) -> list[bool]:
        if policy in found:
            return found[policy]
        name, *how = policy.split("/")
        budget = {} if policy == "full" else {"kv_budget": BUDGET}
        if "bounded" in how:
            budget |= {"kv_prefill": "bounded", "n_batch": BUDGET}
        llm = Llama(
            smollm2,
            n_ctx=1280,
            n_threads=2,
            flash_attn=True,
            verbose=False,
            kv_policy=name,
            **budget,
        )
        if "query" in how or "blind" in how:
            llm.kv_query(QUESTION if "query" in how else "")
        found[policy] = []
        for seed in range(n_samples):
            prompt, number = sample(llm, seed)
            assert N_TOKENS - 150 < len(prompt) < N_TOKENS + 50
            answer = []
            for token in llm.generate(prompt, temp=0.0):
                if token == llm.token_eos() or len(answer) == N_ANSWER:
                    break
                answer.append(token)
            found[policy].append(number in llm.detokenize(answer).decode(errors="replace"))
            stats = llm.kv_stats()
            assert policy == "full" or (stats.n_evictions > 0 and stats.n_used <= BUDGET)
            llm.reset()
        return found[policy]

    return measure


def share(recall, policy: str) -> float:
    """Share of the samples the full cache answers that the policy answers too."""
    full = recall("full")
    assert sum(full) >= 0.7 * len(full)
    return sum(p for p, f in zip(recall(policy), full, strict=True) if f) / sum(full)


@pytest.mark.parametrize("policy", ["inertiakv", "inertiakv-lazy", "score-free"])
def test_attention_finds_the_number(recall, policy):
    assert share(recall, policy) >= 0.9


@pytest.mark.parametrize("policy", ["inertiakv/bounded", "inertiakv/bounded/query"])
def test_what_is_asked_keeps_its_answer_in_a_bounded_prefill(recall, policy):
    """Blind cuts lose many."""
    assert share(recall, policy) >= 0.8
    assert share(recall, "inertiakv/bounded/blind") < share(recall, policy)


@pytest.mark.parametrize(("policy", "bar"), [("streaming-llm", 0.45), ("random", 0.15)])
def test_without_attention_it_is_lost(recall, policy, bar):
    assert share(recall, policy) < bar
