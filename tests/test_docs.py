"""Facts that stand in two places agree: README, docs/, pin, C header, Python.

Needs no native library.
"""

from __future__ import annotations

import ast
import ctypes
import inspect
import re
from dataclasses import fields
from pathlib import Path

import numpy as np
import pages
import pytest

import pyinertia
from pyinertia import POLICIES, KVPolicy, KVStats, _native
from pyinertia.policy import AGGREGATIONS, HEADS, KEY_SCORERS, QUERY_SCORERS, SCORERS

ROOT = pages.ROOT
HEADER = (ROOT / "patches/overlay/include/llama-kv-evict.h").read_text(encoding="utf-8")
POLICY_PAGE, MEASURED = "docs/policies.md", "docs/measured.md"

COLUMNS = ["policy", "scorer", "aggregation", "beta", "lambda_", "n_budget", "n_sink"]
COLUMNS += ["n_recent", "n_window", "n_pool", "n_refresh", "frozen"]

C_TYPES = {
    "enum llama_kv_scorer": ctypes.c_int,
    "enum llama_kv_heads": ctypes.c_int,
    "enum llama_kv_aggregation": ctypes.c_int,
    "float": ctypes.c_float,
    "double": ctypes.c_double,
    "uint32_t": ctypes.c_uint32,
    "uint64_t": ctypes.c_uint64,
    "bool": ctypes.c_bool,
}


def expected_row(name: str, policy: KVPolicy) -> list[str]:
    if policy.scorer == "none":  # nothing else has a meaning
        return [name, "none", *["-"] * (len(COLUMNS) - 2)]
    texts = {None: "auto", True: "yes", False: "no"}
    cells = [getattr(policy, column) for column in COLUMNS[1:]]
    return [name, *(texts[c] if c is None or isinstance(c, bool) else str(c) for c in cells)]


def test_the_policy_table_is_the_presets():
    rows = pages.table_rows(pages.read(POLICY_PAGE))
    start = rows.index(COLUMNS)
    table = rows[start + 2 : start + 2 + len(POLICIES)]
    expected = [expected_row(name, policy) for name, policy in POLICIES.items()]
    pasteable = "\n".join("| " + " | ".join(row) + " |" for row in expected)
    assert table == expected, f"{POLICY_PAGE} should have:\n{pasteable}"
    beyond = rows[start + 2 + len(POLICIES) :]
    assert not beyond or beyond[0][0] not in POLICIES


def test_every_preset_has_a_paragraph():
    described = re.findall(r"^\*\*`([\w-]+)`\*\*", pages.read(POLICY_PAGE), re.MULTILINE)
    assert sorted(described) == sorted(POLICIES)


def test_readme_example_calls_what_exists():
    import llama_cpp

    example = pages.python(pages.README)[0]
    nodes = list(ast.walk(ast.parse(example)))
    assert len(example.splitlines()) <= 12
    (call,) = (n for n in nodes if isinstance(n, ast.Call) and ast.unparse(n.func) == "Llama")
    known = {
        name
        for cls in (pyinertia.Llama, llama_cpp.Llama)
        for name in inspect.signature(cls.__init__).parameters
    }
    assert {keyword.arg for keyword in call.keywords} <= known
    used = {n.attr for n in nodes if isinstance(n, ast.Attribute) and ast.unparse(n.value) == "llm"}
    assert {"kv_stats", "kv_cells"} <= used
    assert all(hasattr(pyinertia.Llama, name) for name in used)


def test_the_numbers_name_their_command():
    text = pages.read(MEASURED)
    assert "pyinertia bench" in text
    assert "tests/test_retrieval.py" in text
    assert "pyinertia eval ruler" in text
    rows = {row[0] for row in pages.table_rows(text)}
    assert {"inertiakv", "score-free", "inertiakv/bounded"} <= rows


def test_the_readme_s_numbers_are_those_of_the_page():
    section, text = pages.section(pages.README, "Measured"), pages.read(MEASURED)
    cells = {cell for row in pages.table_rows(section) for cell in row}
    numbers = {cell for cell in cells if re.fullmatch(r"[\d.]+", cell)}
    numbers |= set(re.findall(r"\d+ of \d+", section))
    assert len(numbers) >= 10
    for number in numbers:
        assert re.search(rf"(?<![\d.,]){re.escape(number)}(?![\d,]|\.\d)", text), number


@pytest.mark.parametrize("page", pages.PAGES)
def test_links_lead_to_pages_and_headings(page):
    for target, anchor in re.findall(r"\]\(([^)#\s]*)#?([^)\s]*)\)", pages.read(page)):
        if not target.startswith("https://"):
            path = ((ROOT / page).parent / target).resolve() if target else ROOT / page
            assert path.is_file(), target
            assert not anchor or anchor in pages.anchors(path), f"{target}#{anchor}"


@pytest.mark.parametrize("page", pages.PAGES)
def test_paths_that_a_page_names_exist(page):
    rooms = "patches|pyinertia|tests|scripts|vendor|docs"
    for path in re.findall(rf"`((?:{rooms})/[\w./*-]*)`", pages.read(page)):
        if path != "vendor/llama.cpp":  # it is made from the pin
            assert any(ROOT.glob(path.rstrip("/"))), path


def test_every_page_is_in_the_table_of_contents():
    nav = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:")[2]
    named = re.findall(r"[\w/-]+\.md", nav.partition("\n\n")[0])
    assert sorted(f"docs/{name}" for name in named) == sorted(pages.PAGES[1:])


def test_pin_is_the_vendored_one():
    pin = dict(
        re.findall(
            r'^(\w+)\s*=\s*"([^"]*)"',
            (ROOT / "vendor/llama.cpp.toml").read_text(encoding="utf-8"),
            re.MULTILINE,
        )
    )
    assert pin["package"].replace("-", "_") == "llama_cpp_python"
    assert pin["version"] == _native.LLAMA_CPP_PYTHON
    assert pin["commit"] == _native.LLAMA_CPP_COMMIT


def test_every_dependency_on_llama_cpp_python_names_the_pin():
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    versions = re.findall(r"llama[-_]cpp[-_]python\s*==\s*([\d.]+)", text)
    assert versions
    assert set(versions) == {_native.LLAMA_CPP_PYTHON}


def test_every_extra_that_is_named_exists():
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    table = project.partition("[project.optional-dependencies]\n")[2].partition("\n[")[0]
    extras = set(re.findall(r"^([\w-]+) = ", table, re.MULTILINE))
    package = "".join(path.read_text(encoding="utf-8") for path in ROOT.glob("pyinertia/**/*.py"))
    named = set(re.findall(r"pyinertia\\*\[([\w-]+)\]'", package))
    shown = set(re.findall(r"'\.\[([\w-]+)\]'", "".join(map(pages.read, pages.PAGES))))
    assert {"ray", "langchain", "llama-index", "llm"} <= shown <= extras
    assert {"ray", "langchain", "llama-index", "plot"} <= named <= extras


def enumerators(prefix: str) -> dict[str, int]:
    found = re.findall(rf"{prefix}_(\w+)\s*=\s*(\d+)", HEADER)
    return {name.lower(): int(value) for name, value in found}


def test_names_are_the_enumerators_of_the_header():
    scorers = {name.replace("_", "-"): v for name, v in enumerators("LLAMA_KV_SCORER").items()}
    assert dict(SCORERS) == scorers
    assert {*SCORERS} - {*QUERY_SCORERS, *KEY_SCORERS} == {"none", "recency", "random"}
    assert dict(HEADS) == enumerators("LLAMA_KV_HEADS")
    assert dict(AGGREGATIONS) == enumerators("LLAMA_KV_AGGREGATION")


def members(struct: str) -> list[tuple[str, str]]:
    body = re.search(rf"struct {struct} \{{(.*?)\}};", HEADER, re.DOTALL).group(1)
    body = re.sub(r"//.*", "", body)
    return [(name, kind.strip()) for kind, name in re.findall(r"([\w ]+?)\s+(\w+);", body)]


def test_structs_mirror_the_header():
    for mirror in (_native.EvictParams, _native.EvictStats):
        struct = mirror.__doc__.split()[1].rstrip(".")
        ours = [(name.rstrip("_"), kind) for name, kind in mirror._fields_]
        assert ours == [(name, C_TYPES[kind]) for name, kind in members(struct)]
    assert members("llama_kv_evict_cell") == [("pos", "llama_pos"), ("score", "float")]
    assert np.dtype([("pos", "i4"), ("score", "f4")]) == _native.CELL


def test_stats_and_policy_fields_are_those_of_c():
    assert [f.name for f in fields(KVStats)] == [
        name for name, _ in members("llama_kv_evict_stats")
    ]
    in_c = {name for name, _ in members("llama_kv_evict_params")}
    in_python = {f.name.rstrip("_") for f in fields(KVPolicy)}
    # a share is a float n_budget, compact is a test switch, lists have calls of their own
    assert in_c - in_python == {"budget_share", "bounded", "compact", "n_ctx"}
    assert in_python - in_c == {"prefill", "protect", "layer_weights", "scorer_file"}


def test_every_function_of_the_header_is_declared_with_its_arguments():
    text = re.sub(r"//.*", "", HEADER)
    declared = dict(re.findall(r"LLAMA_API[^;]*?(llama_kv_evict_\w+)\s*\(([^)]*)\)", text))
    assert set(declared) == set(_native._SIGNATURES)
    for name, arguments in declared.items():
        n_arguments = 0 if arguments.strip() == "void" else arguments.count(",") + 1
        assert len(_native._SIGNATURES[name][1]) == n_arguments, name
    abi = re.search(r"LLAMA_KV_EVICT_ABI_VERSION (\d+)", HEADER).group(1)
    assert int(abi) == _native.ABI_VERSION


def test_the_comment_above_each_signature_is_the_header():
    source = Path(_native.__file__).read_text(encoding="utf-8")
    comments = re.sub(r"\n\s*# *", " ", source)

    def squeezed(text: str) -> str:
        return re.sub(r"\s+", "", re.sub(r"//.*", "", text))

    for declaration in re.findall(r"LLAMA_API[^;]*;", re.sub(r"//.*", "", HEADER)):
        assert squeezed(declaration) in squeezed(comments), declaration


def test_everything_public_is_importable_and_documented():
    for name in pyinertia.__all__:
        if name != "Llama":  # needs the native library; tests/test_llama_api.py
            assert name == "POLICIES" or getattr(pyinertia, name).__doc__
    documented = KVPolicy.__doc__
    assert all(f"{f.name}:" in documented for f in fields(KVPolicy))
    assert all(f"{f.name}:" in KVStats.__doc__ for f in fields(KVStats))
