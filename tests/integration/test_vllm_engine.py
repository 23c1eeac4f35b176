"""VLLMEngine against Hugging Face, in one set of four gloo processes that builds every grid one after the other.

The processes run all scenarios once and return plain values; the tests below look at them.
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing as mp
from torch import Tensor

from hybridflow.config import VLLM
from hybridflow.engines.vllm.layout import stage_layers
from hybridflow.engines.vllm.requirements import check
from hybridflow.errors import ConfigError, ModelError
from hybridflow.models.spec import ModelSpec
from hybridflow.tracing.estimate import generation_bytes
from tests.contracts.rank_processes import forking
from tests.integration.session_scenarios import PROMPTS as SESSION_PROMPTS
from tests.integration.turn_scenarios import check as check_turns
from tests.integration.vllm_scenarios import (
    CONTEXT,
    EOS,
    FAMILIES,
    GREEDY,
    LACKING,
    PROMPTS,
    RANDOM,
    SCENARIOS,
    process,
    save_model,
)

# `make test` builds these; the others are slow.
OFTEN = ("llama", "p2t2-p2t1", "d4-p1t4", "qwen2")


def cases(wanted: Callable[[str], bool] = lambda name: True) -> pytest.MarkDecorator:
    """The scenarios that are wanted."""
    marks = {name: () if name in OFTEN else pytest.mark.slow for name in SCENARIOS if wanted(name)}
    return pytest.mark.parametrize("name", [pytest.param(name, marks=mark) for name, mark in marks.items()])


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("models")
    for family in FAMILIES:
        save_model(family, directory / family)
    return directory


@pytest.fixture(scope="module")
def results(root: Path, request: pytest.FixtureRequest) -> dict[str, dict[int, dict[str, Any]]]:
    """scenario -> world rank -> what that process saw, of the scenarios that a test asks for."""
    asked = {item.callspec.params.get("name") for item in request.session.items if hasattr(item, "callspec")}
    names = [name for name in SCENARIOS if name in asked | {"llama"}]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    forking()
    mp.start_processes(process, (port, root, names), nprocs=4, start_method="forkserver")
    ranks = [torch.load(root / f"rank{r}.pt", weights_only=False) for r in range(4)]
    return {name: {r: ranks[r][name] for r in SCENARIOS[name][0]} for name in names}


@pytest.fixture(scope="module")
def models(root: Path) -> dict[str, Any]:
    from transformers import AutoModelForCausalLM

    return {family: AutoModelForCausalLM.from_pretrained(root / family).float().eval() for family in FAMILIES}


def _scale(model: Any, factor: float) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(factor)


@torch.no_grad()
def _logits(model: Any, prompt: list[int], response: list[int]) -> Tensor:
    """[R, V]: Hugging Face's logits at the positions that predict each response token."""
    return model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1].float()


def _check_log_probs(model: Any, rows: list, temperature: float) -> None:
    for prompt, completions in zip(PROMPTS, rows, strict=True):
        for token_ids, log_probs, _ in completions:
            wanted = (_logits(model, prompt, token_ids) / temperature).log_softmax(-1)
            wanted = wanted.gather(-1, torch.tensor(token_ids)[:, None])[:, 0]
            assert torch.tensor(log_probs).sub(wanted).abs().max() < 1e-3


def _check_greedy(model: Any, rows: list) -> None:
    _check_log_probs(model, rows, 1.0)
    for prompt, [(token_ids, _, finished)] in zip(PROMPTS, rows, strict=True):
        assert len(token_ids) == GREEDY.max_tokens
        assert not finished
        assert token_ids == _logits(model, prompt, token_ids).argmax(-1).tolist()


@cases()
def test_greedy_tokens_and_log_probs_equal_hugging_face(results, models, name) -> None:
    for out in results[name].values():
        _check_greedy(models[SCENARIOS[name][4]], out["greedy"])


@cases()
def test_outputs_follow_weights_written_in_place(results, models, name) -> None:
    model = models[SCENARIOS[name][4]]
    _scale(model, 0.8)
    try:
        for out in results[name].values():
            _check_greedy(model, out["scaled"])
            assert out["scaled"] != out["greedy"]
    finally:
        _scale(model, 1 / 0.8)


@cases()
def test_sampled_log_probs_are_those_at_the_temperature(results, models, name) -> None:
    for out in results[name].values():
        _check_log_probs(models[SCENARIOS[name][4]], out["random"], RANDOM.temperature)


@cases()
def test_all_ranks_of_a_replica_return_the_same(results, name) -> None:
    by_replica: dict[int, list] = {}
    for out in results[name].values():
        by_replica.setdefault(out["replica"], []).append((out["greedy"], out["random"], out["unseeded"]))
    sizes = SCENARIOS[name][2] * SCENARIOS[name][3]
    assert all(len(same) == sizes and same.count(same[0]) == sizes for same in by_replica.values())


@cases()
def test_seeds_make_tokens_independent_of_the_split(results, name) -> None:
    tokens = lambda rows: [[c[0] for c in row] for row in rows]  # noqa: E731
    whole = tokens(next(iter(results[name].values()))["random"])
    for out in results[name].values():
        start, part = out["split"]
        assert tokens(out["random"]) == whole
        assert tokens(part) == whole[start : start + 2]


def test_responses_to_one_prompt_differ_and_unseeded_calls_differ(results) -> None:
    for out in results["llama"].values():
        assert any(row[0][0] != row[1][0] for row in out["random"])
        assert out["unseeded"][0] != out["unseeded"][1]


@cases()
def test_storage_is_covered_and_the_training_process_left_as_it_was(results, name) -> None:
    _, _, p_g, _, family = SCENARIOS[name]
    for out in results[name].values():
        assert out["empty"] == []
        assert out["rng"]
        assert out["world"] == 4
        assert out["ident"].startswith("hf5e5510")  # by which the session finds what a killed process left
        assert out["segments"] == []  # also while it runs: a killed process leaves none
        padding = 58 * 128 * (1 if family == "qwen3" or p_g == 2 else 2)  # at most this much is nowhere in the layout
        assert 0 <= out["stored"] - out["covered"] <= padding


@cases()
def test_an_estimate_of_generation_has_its_bytes(results, root, name) -> None:
    _, _, p_g, t_g, family = SCENARIOS[name]
    spec, ranks = ModelSpec.from_checkpoint(root / family), results[name].values()
    weights, cache = generation_bytes(VLLM(tp=t_g, pp=p_g), spec, "float32")
    assert weights == 4 * max(out["covered"] for out in ranks)
    assert {out["token bytes"] for out in ranks} == {cache}


def test_layers_are_divided_as_vllm_divides_them(results) -> None:
    for (layers, stages), bounds in results["llama"][2]["stages"].items():
        ours = [stage_layers(layers, i, stages) for i in range(stages)]
        assert [(part.start, part.stop) for part in ours] == bounds


def test_the_short_path_decides_as_vllm_does(results):
    found = results["llama"][2]["schedulers"]
    assert found["difference"] == ""
    assert found["short"] > 300
    assert found["steps"] - found["short"] > 100
    assert found["preempted"] > 0
    assert found["finished"] > 100


def test_truncation_limits_tokens_and_not_log_probs(results, models) -> None:
    out = results["llama"][2]
    for name, allowed in (("top_k", lambda p: 3), ("top_p", lambda p: int((p.cumsum(-1) < 0.5).sum()) + 1)):
        _check_log_probs(models["llama"], out[name], 1.3)
        for prompt, [(token_ids, _, _)] in zip(PROMPTS, out[name], strict=True):
            probs = (_logits(models["llama"], prompt, token_ids) / 1.3).softmax(-1)
            for row, token in zip(probs, token_ids, strict=True):
                ranked, order = row.sort(descending=True)
                assert token in order[: allowed(ranked)]


def test_stop_tokens_end_responses_and_stay_in_them(results) -> None:
    out = results["llama"][2]
    completions = [c for row in out["eos"] for c in row]
    assert any(finished for _, _, finished in completions)
    for token_ids, log_probs, finished in completions:
        assert len(token_ids) == len(log_probs)
        assert finished == (token_ids[-1] == EOS)
        assert EOS not in token_ids[:-1]
        assert finished or len(token_ids) == 40
    assert all(len(c[0]) == 40 and not c[2] for row in out["no_eos"] for c in row)


def test_stop_strings_end_responses_and_stay_in_them(results) -> None:
    completions = [c for row in results["llama"][2]["stop"] for c in row]
    assert any(finished for _, _, finished in completions)
    for token_ids, log_probs, finished in completions:
        text = " ".join(f"w{i}" for i in token_ids)
        before = " ".join(f"w{i}" for i in token_ids[:-1])
        assert len(token_ids) == len(log_probs)
        assert finished == ("w7" in text or "w8 w" in text)
        assert "w7" not in before
        assert "w8 w" not in before


# Sessions


@pytest.mark.parametrize("how", ["again", "new weights", "asleep"])
def test_a_row_that_is_interrupted_at_every_step_equals_the_uninterrupted_one(results, how) -> None:
    out = results["llama"][2]["session"]
    whole, found = out["whole"], out[how]
    assert out["generated"] == [row["token_ids"] for row in whole[:6]]
    assert any(row["end"] == "length" for row in whole)
    for row, other in zip(whole, found, strict=True):
        for name in ("row_id", "index", "token_ids", "end"):
            assert row[name] == other[name], name
        # a key computed again by a longer pass may differ in its last bit
        assert torch.tensor(row["log_probs"]).sub(torch.tensor(other["log_probs"])).abs().max() < 1e-5
        assert len(row["log_probs"]) == len(row["token_ids"]) == len(other["policy_version"])
        assert (row["spans"], row["recomputed"]) == (1, 0)
        assert other["spans"] == len(row["token_ids"])
    if how == "new weights":
        assert all(row["policy_version"] == sorted(set(row["policy_version"])) for row in found)


def test_a_row_that_pauses_at_every_step_is_the_same_bit_for_bit(results) -> None:
    out = results["llama"][2]["session"]
    assert out["paused"] == out["whole"]


@cases(lambda name: SCENARIOS[name][4] == "llama")
def test_rows_continue_in_another_engine(results, name) -> None:
    whole = results["llama"][2]["session"]["whole"]
    for out in results[name].values():
        for found in out["session"]["moved"]:
            assert [row["token_ids"] for row in found] == [row["token_ids"] for row in whole]
            for row, other in zip(whole, found, strict=True):
                assert row["end"] == other["end"]
                assert torch.tensor(row["log_probs"]).sub(torch.tensor(other["log_probs"])).abs().max() < 1e-5


@cases(lambda name: SCENARIOS[name][4] == "llama" and name != "llama")
def test_ranks_of_a_replica_agree_when_the_time_is_over(results, name) -> None:
    whole, by_replica = results["llama"][2]["session"]["whole"], {}
    for out in results[name].values():
        by_replica.setdefault(out["replica"], set()).add(out["session"]["calls"])
        assert [row["token_ids"] for row in out["session"]["timed"]] == [row["token_ids"] for row in whole]
        assert out["session"]["calls"] > 1
    assert all(len(calls) == 1 for calls in by_replica.values())


def test_tokens_have_the_version_that_sampled_them(results, models) -> None:
    out = results["llama"][2]["session"]["versions"]
    assert out["last"] == 9
    for prompt, row in zip(SESSION_PROMPTS, out["rows"], strict=True):
        assert row["policy_version"] == [7] * 3 + [8] * 5 + [9] * 4
        assert (row["spans"], row["recomputed"]) == (3, 2 * len(prompt) + 3 + 8)
        tokens, found = row["token_ids"], torch.tensor(row["log_probs"])
        of_version = []
        for scale in (1.0, 0.8, 1.2):
            _scale(models["llama"], scale)
            logp = _logits(models["llama"], prompt, tokens).log_softmax(-1)
            of_version.append(logp.gather(-1, torch.tensor(tokens)[:, None])[:, 0])
            _scale(models["llama"], 1 / scale)
        wanted = torch.stack(of_version)[torch.tensor(row["policy_version"]) - 7, torch.arange(len(tokens))]
        assert found.sub(wanted).abs().max() < 1e-3
        assert found.sub(of_version[0]).abs().max() > 1e-2


def test_a_kept_cache_stays_with_its_rows(results) -> None:
    kept = results["llama"][2]["kept"]
    for name in ("equal", "other"):
        computed, fresh, [row] = kept[name]
        assert computed == [43]  # 40 of the prompt, 3 tokens: nothing is computed again
        assert row["spans"] == 1
        assert len(set(row["policy_version"])) == 2
        assert fresh == kept["whole" if name == "equal" else "fresh"]
    assert kept["equal"][2][0]["token_ids"] == kept["whole"]


@cases()
def test_keys_and_values_wait_while_the_engine_sleeps(results, name) -> None:
    """After every step: rows are those of an engine that never slept, bit for bit, and nothing is computed again. The
    used blocks only are copied, once out and once in."""
    for rank in results[name].values():
        out = rank["waiting"]
        assert out["keep"] == out["offload"] == out["awake"]
        assert {row["recomputed"] for row in out["offload"]} == {0}
        assert all(row["recomputed"] > 0 for row in out["recompute"] if len(row["token_ids"]) > 1)
        for again, chosen, row in zip(out["recompute"], out["auto"], out["awake"], strict=True):
            assert again["token_ids"] == chosen["token_ids"] == row["token_ids"]
            assert torch.tensor(again["log_probs"]).sub(torch.tensor(row["log_probs"])).abs().max() < 1e-5
            assert chosen["recomputed"] <= again["recomputed"]
        assert 0 < sum(row["recomputed"] for row in out["auto"]) < sum(row["recomputed"] for row in out["recompute"])
        assert out["keep copied"] == out["recompute copied"] == [0, 0]
        assert out["offload copied"][0] == out["offload copied"][1] > 0
        assert out["waits"] > out["left"] == 0
        assert [row["token_ids"] for row in out["moved"]] == [row["token_ids"] for row in out["awake"]]


@cases(lambda name: name in LACKING)
def test_rows_are_computed_again_where_one_rank_lacks_memory_for_what_waits(results, name) -> None:
    """All ranks of a replica choose alike, by the one that has least room, and by the largest of unequal parts."""
    by_replica: dict[int, list[Any]] = {}
    for out in results[name].values():
        by_replica.setdefault(out["replica"], []).append(out["lacking"])
        found, waiting = out["lacking"], out["waiting"]
        again = [row["recomputed"] for row in waiting["recompute"]]
        for case in ("keep sleep", "keep wake", "offload sleep", "offload wake", "room", "unequal", "rescued"):
            assert [row["token_ids"] for row in found[case]] == [row["token_ids"] for row in waiting["awake"]], case
        for case in ("keep sleep", "keep wake", "offload sleep", "offload wake", "unequal"):
            assert [row["recomputed"] for row in found[case]] == again, case
        assert 0 < sum(row["recomputed"] for row in found["room"]) < sum(again)
        assert all(row["recomputed"] for row in found["rescued"] if len(row["token_ids"]) > 3)
        assert found["asleep"]
    for ranks in by_replica.values():
        assert [rank.pop("error") for rank in ranks] == ["WorkerError", "OutOfMemoryError"]
        assert ranks[0] == ranks[1]


def test_a_session_returns_at_its_limits(results) -> None:
    limits = results["llama"][2]["session"]["limits"]
    whole = {(row["row_id"], row["index"]): row for row in results["llama"][2]["session"]["whole"]}
    for name in ("rows", "groups", "steps"):
        taken, withdrawn = limits[name]
        assert sorted((row["row_id"], row["index"]) for row in taken + withdrawn) == sorted(whole)[:6]
        for row in taken + withdrawn:
            tokens = whole[row["row_id"], row["index"]]["token_ids"]
            assert row["token_ids"] == (tokens if row["end"] else tokens[: len(row["token_ids"])])
    assert len(limits["rows"][0]) >= 2
    assert {row["row_id"] for row in limits["groups"][0]} - {row["row_id"] for row in limits["groups"][1]}
    assert {len(row["token_ids"]) for row in limits["steps"][1]} == {5}
    assert limits["empty"] == ([], [], [])


def test_errors_of_a_session_lose_no_row(results) -> None:
    session = results["llama"][2]["session"]
    errors, whole = session["errors"], session["whole"]
    assert errors["twice"].startswith("ConfigError: row 0.0 was submitted twice")
    assert errors["left"] == 0
    assert errors["held"].startswith("ConfigError: row 0.0 was submitted twice")
    assert errors["waiting"].startswith("ConfigError: row 0.0 was submitted twice")
    assert errors["finished"].startswith("ConfigError: row 0.0 is finished")
    assert errors["prompt"].startswith("PromptError: prompt 0 is empty")
    assert errors["raised"] == "a step failed"
    assert errors["scheduled"] == 0
    assert errors["unfinished"] == len(errors["rescued"])
    wanted = {(row["row_id"], row["index"]): row["token_ids"] for row in whole}
    assert all(row["token_ids"] == wanted[row["row_id"], row["index"]] for row in errors["rescued"])


@cases(lambda name: SCENARIOS[name][4] == "llama")
def test_turns_of_a_conversation_compute_their_new_tokens(results, name) -> None:
    exact, first = not name.endswith(("p2t1", "p2t2")), results["llama"][2]["turns"]["kept"]
    by_replica: dict[int, list[dict[str, Any]]] = {}
    for out in results[name].values():
        by_replica.setdefault(out["replica"], []).append(out["turns"])
    for ranks in by_replica.values():
        (kept,) = (rank["kept"] for rank in ranks if rank["kept"]["turns"] is not None)
        (other,) = (rank["not kept"] for rank in ranks if rank["kept"]["turns"] is not None)
        check_turns(kept, other, exact)
        assert [[row["ids"] for row in each] for each in kept["turns"]] == [
            [row["ids"] for row in each] for each in first["turns"]
        ]
        assert {rank["kept"]["left"] for rank in ranks} == {(0, 0)}
        assert len({rank["kept"]["planned"] for rank in ranks}) == 1
        assert exact == (kept["planned"] < other["planned"])


def test_held_caches_make_room_for_others(results) -> None:
    crowded = results["llama"][2]["crowded"]
    for name, found in crowded.items():
        assert found["left"] == (0, 0), name
        rows = [row for each in found["turns"] for row in each]
        assert any(row["prefilled"] == row["new"] < len(row["ids"]) - len(row["tokens"]) for row in rows), name
        assert any(row["prefilled"] > row["new"] for row in rows), name


def test_stop_strings_are_found_across_interruptions(results) -> None:
    out = results["llama"][2]["stop session"]
    kept = ("row_id", "index", "token_ids", "end")
    whole, again = ([{name: row[name] for name in kept} for row in out[how]] for how in ("whole", "again"))
    assert whole == again
    assert any(row["end"] == "stop" and len(row["token_ids"]) > 2 for row in whole)
    turns = results["llama"][2]["stop turns"]
    check_turns(turns["kept"], turns["not kept"])
    assert any(row["end"] == "stop" for each in turns["kept"]["turns"] for row in each[:-1])


def test_sleep_frees_the_cache_and_wake_restores_it(results) -> None:
    out = results["llama"][2]
    assert out["cached"][0] == out["cached"][1]
    assert out["asleep"][0] == 0
    assert "wake()" in out["asleep"][1]
    assert out["woken"] == out["cached"][0]


@cases()
def test_weights_come_back_where_they_were(results, name) -> None:
    for out in results[name].values():
        released = out["released"]
        assert released["sizes"] == [True] * 3
        assert all(error.startswith("PlacementError") and "are released" in error for error in released["errors"])
        assert released["greedy"] == out["greedy"]  # bit for bit
        assert released["kept"]


def test_twenty_cycles_of_release_and_acquire_leave_nothing_behind(results) -> None:
    growth = results["llama"][2]["growth"]
    before, after = growth["bytes"]
    assert after < 1.02 * before
    assert growth["equal"]
    assert growth["greedy"] == results["llama"][2]["greedy"]


def test_weights_can_live_in_the_memory_of_somebody_else(results) -> None:
    shared, greedy = results["llama"][2]["shared"], results["llama"][2]["greedy"]
    assert shared["refused"] == [False] * 3
    assert shared["unknown"].startswith("LayoutError: vLLM has no parameter 'lm_head'")
    assert shared["one"]
    assert shared["changed"] != shared["same"] == greedy
    assert shared["left"] == (0, True)
    assert "memory().acquire()" in shared["early"]
    assert shared["back"] == greedy
    assert shared["all"]
    assert shared["rest"] == 0
    assert shared["again"] == greedy


def test_errors_say_what_was_asked_and_found(results) -> None:
    errors = results["llama"][2]["errors"]
    assert errors["long"].startswith("PromptError: prompt 1 has 64 tokens")
    assert errors["room"].startswith("PromptError: prompt 0 has 59 tokens")
    assert errors["empty"].startswith("PromptError: prompt 1 is empty")
    assert errors["vocabulary"].startswith("PromptError: prompt 1 has token ids")
    assert errors["stop"].startswith("ConfigError")
    assert "tokenizer" in errors["stop"]
    assert errors["seeds"].startswith("ConfigError: generate got 1 seeds for 4 prompts")
    assert errors["partition"].startswith("ConfigError: VLLM_PP_LAYER_PARTITION='3' is set")
    assert errors["invariant"].startswith("ConfigError: VLLM_BATCH_INVARIANT is set")
    assert errors["second"].startswith("PlacementError")
    assert "already has a vLLM engine" in errors["second"]


def test_what_vllm_cannot_run_is_refused_on_the_driver(root) -> None:
    spec = ModelSpec.from_checkpoint(root / "llama")
    for change, strategy, device, error, words in (
        ({"head_dim": 16}, VLLM(), "cpu", ModelError, "head_dim=16"),
        ({"head": "value"}, VLLM(), "cpu", ModelError, "'value' head"),
        ({}, VLLM(tp=3), "cpu", ModelError, "Use tp in [1, 2, 4]"),
        ({}, VLLM(pp=4), "cuda", ModelError, "3 layers"),
        ({}, VLLM(max_length=CONTEXT + 1), "cuda", ConfigError, "context is 64"),
        ({"context": 10**6}, VLLM(), "cpu", ConfigError, "kv_cache_gb"),
    ):
        with pytest.raises(error, match=re.escape(words)):
            check(replace(spec, **change), strategy, device)
    check(replace(spec, head_dim=16), VLLM(tp=2), "cuda")
