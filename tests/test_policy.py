"""Policies: fields, ranges, presets, lookup, messages. Needs no native library."""

from __future__ import annotations

import math
import re
from dataclasses import FrozenInstanceError, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pyinertia import POLICIES, KVPolicy, PolicyError, resolve_policy

DEFAULTS = {
    "scorer": "attention",
    "scorer_file": None,
    "heads": "mean",
    "aggregation": "ema",
    "beta": 0.99,
    "lambda_": None,
    "layer_weights": None,
    "n_budget": 1024,
    "n_sink": 4,
    "n_recent": 32,
    "n_window": 16,
    "n_pool": 21,
    "n_refresh": 1,
    "frozen": False,
    "prefill": "full",
    "protect": (),
    "seed": 0,
}

PRESETS = {
    "full": {"scorer": "none"},
    "inertiakv": {},
    "inertiakv-lazy": {"n_refresh": 8},
    "score-free": {"frozen": True},
    "coupled": {"aggregation": "coupled", "beta": 0.99},
    "streaming-llm": {"scorer": "recency"},
    "h2o": {"aggregation": "sum", "lambda_": 1.0},
    "tova": {"aggregation": "last", "lambda_": 1.0, "n_window": 0, "n_pool": 1},
    "random": {"scorer": "random"},
    "snapkv": {"lambda_": 1.0, "n_window": 32, "n_pool": 7, "frozen": True},
    "value-norm": {"scorer": "value-norm"},
    "entropy": {"scorer": "entropy"},
    "keydiff": {"scorer": "keydiff"},
    "key-norm": {"scorer": "key-norm"},
    "learned": {"scorer": "learned", "aggregation": "last"},
}


def values(policy: KVPolicy) -> dict[str, object]:
    return {name: getattr(policy, name) for name in DEFAULTS}


def test_presets_are_the_designed_ones():
    assert {name: values(policy) for name, policy in POLICIES.items()} == {
        name: DEFAULTS | changes for name, changes in PRESETS.items()
    }


def test_only_full_keeps_everything():
    assert [name for name, policy in POLICIES.items() if not policy.evicts] == ["full"]


def test_policies_cannot_be_changed():
    with pytest.raises(FrozenInstanceError):
        POLICIES["inertiakv"].beta = 0.5
    with pytest.raises(TypeError):
        POLICIES["inertiakv"] = KVPolicy()
    with pytest.raises(TypeError):
        KVPolicy("attention")


@pytest.mark.parametrize(
    ("field", "bad"),
    [
        ("scorer", "atention"),
        ("scorer", None),
        ("scorer", "key_norm"),
        ("heads", "sum"),
        ("heads", None),
        ("aggregation", "median"),
        ("beta", -0.1),
        ("beta", 1.0),
        ("beta", math.nan),
        ("beta", "0.9"),
        ("beta", True),
        ("lambda_", 0.0),
        ("lambda_", 1.5),
        ("lambda_", math.nan),
        ("layer_weights", 0.5),
        ("layer_weights", ()),
        ("layer_weights", (0.0, 0.0)),
        ("n_budget", 0),
        ("n_budget", -512),
        ("n_budget", 0.0),
        ("n_budget", 1.0),
        ("n_budget", 512.0),
        ("n_budget", -0.5),
        ("n_budget", math.nan),
        ("n_budget", math.inf),
        ("n_budget", True),
        ("n_budget", "512"),
        ("n_budget", None),
        ("n_budget", 2**31),
        ("n_sink", -1),
        ("n_sink", 4.0),
        ("n_recent", -1),
        ("n_recent", math.nan),
        ("n_window", -1),
        ("n_window", 513),
        ("n_pool", 0),
        ("n_pool", 4),
        ("n_pool", 257),
        ("n_refresh", 0),
        ("n_refresh", False),
        ("frozen", 1),
        ("prefill", "none"),
        ("protect", 5),
        ("protect", ((3,),)),
        ("protect", ((5, 5),)),
        ("protect", ((9, 5),)),
        ("protect", ((-1, 5),)),
        ("seed", -1),
    ],
)
def test_a_bad_value_is_named_with_its_field(field, bad):
    with pytest.raises(PolicyError) as caught:
        KVPolicy(**{field: bad})
    message = str(caught.value)
    assert f"{field}={bad!r}" in message
    assert "must" in message or "only" in message or "empty" in message


def test_a_bounded_prefill_needs_a_count_and_a_scorer():
    with pytest.raises(PolicyError, match="give n_budget as a count"):
        KVPolicy(prefill="bounded", n_budget=0.25)
    with pytest.raises(PolicyError, match="needs a scorer"):
        KVPolicy(prefill="bounded", scorer="none")


def test_coupled_takes_no_lambda():
    with pytest.raises(PolicyError, match="takes its layer weights from beta"):
        KVPolicy(aggregation="coupled", lambda_=0.9)


@pytest.mark.parametrize("bad", [-0.1, math.nan, math.inf, 1e39, True, "1", None])
def test_a_bad_layer_weight_is_named(bad):
    with pytest.raises(
        PolicyError, match=re.escape(f"layer_weights={bad!r}): layer_weights must be")
    ):
        KVPolicy(layer_weights=(0.5, bad))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"lambda_": 0.9}, r"lambda_=0.9 weighs the layers, too"),
        ({"aggregation": "coupled"}, "aggregation='coupled' takes its layer weights from beta"),
        ({"scorer": "recency"}, "scorer='recency' looks at no layer"),
        ({"scorer": "none"}, "scorer='none' looks at no layer"),
    ],
)
def test_layer_weights_stand_alone(fields, message):
    with pytest.raises(PolicyError, match=rf"layer_weights=\(1.0, 2.0\)\): {message}"):
        KVPolicy(layer_weights=(1, 2), **fields)


@pytest.mark.parametrize(
    ("least", "fields"),
    [
        # sinks, recent ones, and one incoming token
        (37, {}),
        # eight tokens come in before the next cut
        (44, {"n_refresh": 8}),
        # the newest cell stays even when n_recent does not ask for it
        (2, {"n_sink": 0, "n_recent": 0}),
        # ranges overlap each other and the sinks: positions 2..9 and 20..29 are 18, less two sinks
        (53, {"protect": ((2, 8), (5, 10), (20, 30))}),
        (37, {"protect": ((0, 4),)}),
    ],
)
def test_a_budget_needs_room_for_what_stays(least, fields):
    assert KVPolicy(n_budget=least, **fields).n_budget == least
    with pytest.raises(PolicyError, match=f"must be at least {least}$"):
        KVPolicy(n_budget=least - 1, **fields)


@given(
    n_sink=st.integers(0, 20),
    n_recent=st.integers(0, 20),
    n_refresh=st.integers(1, 9),
    protect=st.lists(st.tuples(st.integers(0, 40), st.integers(1, 20)), max_size=4),
)
def test_the_least_budget_counts_each_position_once(n_sink, n_recent, n_refresh, protect):
    ranges = tuple((p0, p0 + n) for p0, n in protect)
    policy = KVPolicy(n_sink=n_sink, n_recent=n_recent, n_refresh=n_refresh, protect=ranges)
    kept = set(range(n_sink)).union(*(range(p0, p1) for p0, p1 in ranges))
    assert policy.n_least == len(kept) + max(n_recent, 1) + n_refresh


def test_full_needs_no_budget():
    assert not KVPolicy(scorer="none", n_budget=1).evicts


def test_numbers_of_other_types_become_plain_ones():
    policy = KVPolicy(n_budget=np.int64(512), beta=np.float32(0.5), lambda_=1, protect=[[0, 8]])
    assert (type(policy.n_budget), policy.n_budget) == (int, 512)
    assert (type(policy.beta), policy.beta) == (float, 0.5)
    assert (type(policy.lambda_), policy.lambda_) == (float, 1.0)
    assert policy.protect == ((0, 8),)
    assert KVPolicy(layer_weights=np.float32([0, 2])).layer_weights == (0.0, 2.0)
    assert hash(policy) == hash(replace(policy))
    assert KVPolicy(n_budget=np.float64(0.25)).n_budget == 0.25


def test_a_name_a_policy_and_none_resolve():
    assert resolve_policy(None) is not None
    assert resolve_policy(None) == POLICIES["full"]
    assert resolve_policy("tova") == POLICIES["tova"]
    own = KVPolicy(beta=0.5)
    assert resolve_policy(own) == own


def test_overrides_change_only_their_field():
    assert resolve_policy("h2o", 512) == replace(POLICIES["h2o"], n_budget=512)
    assert resolve_policy("h2o", 0.5, 4) == replace(POLICIES["h2o"], n_budget=0.5, n_refresh=4)
    with pytest.raises(PolicyError, match="n_budget=36"):
        resolve_policy("h2o", 36)
    with pytest.raises(PolicyError, match="n_refresh=0"):
        resolve_policy("h2o", kv_refresh=0)


@pytest.mark.parametrize(
    ("name", "nearest"),
    [("inertia", "inertiakv"), ("H2O", "h2o"), ("", ""), ("streamingllm", "streaming-llm")],
)
def test_an_unknown_name_lists_the_known_ones(name, nearest):
    with pytest.raises(PolicyError) as caught:
        resolve_policy(name)
    message = str(caught.value)
    assert repr(name) in message
    assert all(repr(known) in message for known in POLICIES)
    assert f"Did you mean '{nearest}" in message


@pytest.mark.parametrize("bad", [3, b"inertiakv", KVPolicy, ["full"]])
def test_something_else_is_a_type_error(bad):
    with pytest.raises(TypeError, match="pass a name, a KVPolicy, or None"):
        resolve_policy(bad)


@pytest.mark.parametrize("policy", [None, "full"])
@pytest.mark.parametrize("override", [{"kv_budget": 512}, {"kv_refresh": 2}])
def test_an_override_without_eviction_is_a_type_error(policy, override):
    with pytest.raises(TypeError, match="need a policy that evicts"):
        resolve_policy(policy, **override)


@pytest.mark.parametrize("field", [{"beta": 1 - 1e-9}, {"n_budget": 1 - 1e-9}, {"lambda_": 1e-46}])
def test_values_that_round_out_of_range(field):
    with pytest.raises(PolicyError, match=next(iter(field))):
        KVPolicy(**field)
