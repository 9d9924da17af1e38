"""Facts that stand in two places agree: README, pin, C header, Python. Needs no native library."""

from __future__ import annotations

import ast
import ctypes
import inspect
import re
from dataclasses import fields
from pathlib import Path

import numpy as np

import pyinertia
from pyinertia import POLICIES, KVPolicy, KVStats, _native
from pyinertia.policy import AGGREGATIONS, HEADS, KEY_SCORERS, QUERY_SCORERS, SCORERS

ROOT = Path(__file__).parent.parent
HEADER = (ROOT / "patches/overlay/include/llama-kv-evict.h").read_text(encoding="utf-8")
README = ROOT / "README.md"

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


def test_readme_policy_table_is_the_presets():
    rows = [
        [cell.strip().strip("`") for cell in line.strip().strip("|").split("|")]
        for line in README.read_text(encoding="utf-8").splitlines()
        if line.startswith("|")
    ]
    start = rows.index(COLUMNS)
    table = rows[start + 2 : start + 2 + len(POLICIES)]
    expected = [expected_row(name, policy) for name, policy in POLICIES.items()]
    pasteable = "\n".join("| " + " | ".join(row) + " |" for row in expected)
    assert table == expected, f"README.md should have:\n{pasteable}"
    beyond = rows[start + 2 + len(POLICIES) :]
    assert not beyond or beyond[0][0] not in POLICIES


def test_readme_example_calls_what_exists():
    import llama_cpp

    example = re.search(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)[1]
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


def test_readme_numbers_name_their_command():
    section = README.read_text(encoding="utf-8").partition("## Measured")[2].partition("\n## ")[0]
    assert "pyinertia bench" in section
    assert "tests/test_retrieval.py" in section
    rows = [line.split("|")[1].strip().strip("`") for line in section.splitlines() if "|" in line]
    assert {"inertiakv", "score-free", "inertiakv/bounded"} <= set(rows)


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
