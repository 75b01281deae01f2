from __future__ import annotations

import itertools
import random
import statistics
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtest import arrivals
from loadtest.lengths import PERCENTILES, Quantiles, Trace, fitted
from loadtest.texts import texts_of
from loadtest.workload import Arrivals, Workload
from orca_backend.serving.tokenizer import Tokenizer

CLOSED = Arrivals(kind="closed")
AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9051690,396,109
2023-11-16 18:15:50.9051690,0,1
2023-11-16 18:15:51.2224670,879,55
2023-11-16 18:15:56.6805900,91,16
"""


@pytest.fixture(scope="module")
def azure(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("traces") / "azure.csv"
    path.write_text(AZURE)
    return path


# ---- Texts


def test_texts_have_exactly_so_many_tokens(smollm2: Path) -> None:
    tokenizer = Tokenizer(smollm2)
    source, rng = texts_of(smollm2), random.Random(1)
    for count in [*range(1, 40), 300, 2000]:
        text = source.draw(count, rng)
        assert len(tokenizer.encode(text)) == count
        assert "\ufffd" not in text
    assert "the" in text.split()  # of a language
    beginning = source.draw(50, rng)
    for count in (51, 60, 200):
        assert len(tokenizer.encode(beginning + source.draw(count, rng, after=beginning))) == count


@pytest.mark.parametrize("count", [0, 10**9])
def test_texts_that_there_are_none_of(tiny_llama: Path, count: int) -> None:
    with pytest.raises(ValueError, match=r"no text of \d+ tokens: at least 1"):
        texts_of(tiny_llama).draw(count, random.Random(0))


# ---- Lengths


def test_a_trace_of_azure(azure: Path) -> None:
    trace = Trace.read(azure)
    assert trace.lengths == [(374, 44), (396, 109), (879, 55), (91, 16)]  # not the one without a prompt
    assert trace.times == pytest.approx([0, 4.224579, 4.541877, 10])


@pytest.mark.parametrize(
    ("text", "lengths", "times"),
    [
        ("num_prefill_tokens,num_decode_tokens,num_total_tokens,pd_ratio\n74,918,992,0.08\n", [(74, 918)], None),
        ("arrived_at,num_prefill_tokens,num_decode_tokens\n3.5,7,8\n1.5,5,6\n", [(5, 6), (7, 8)], [0, 2]),
        (
            "Timestamp,Model,Request tokens,Response tokens\n5,GPT,472,18\n45,GPT,1087,230\n",
            [(472, 18), (1087, 230)],
            [0, 40],
        ),
    ],
)
def test_other_files(tmp_path: Path, text: str, lengths: list, times: list | None) -> None:
    (tmp_path / "file.csv").write_text(text)
    trace = Trace.read(tmp_path / "file.csv")
    assert (trace.lengths, trace.times) == (lengths, times)


def test_a_file_of_something_else(tmp_path: Path) -> None:
    (tmp_path / "file.csv").write_text("a,b\n1,2\n")
    with pytest.raises(ValueError, match=r"file\.csv: columns a, b; known are TIMESTAMP, ContextTokens"):
        Trace.read(tmp_path / "file.csv")


def test_quantiles_give_back_the_distribution_that_they_were_made_of() -> None:
    rng = random.Random(0)
    numbers = [round(rng.lognormvariate(5, 1)) + 1 for _ in range(20_000)]
    quantiles = Quantiles.of(numbers)
    drawn = [quantiles.draw(rng) for _ in range(20_000)]
    for percent in PERCENTILES[2:-2]:
        assert sorted(drawn)[200 * percent] == pytest.approx(sorted(numbers)[200 * percent], rel=0.06)
    assert min(numbers) <= min(drawn) <= max(drawn) <= max(numbers)


def test_the_fit_of_a_public_trace_has_its_means() -> None:
    rng = random.Random(0)
    drawn = [fitted("azure-conv-2023")(rng) for _ in range(20_000)]
    assert statistics.mean(prompt for prompt, _ in drawn) == pytest.approx(1155, rel=0.07)  # 1154.7 in the trace
    assert statistics.mean(output for _, output in drawn) == pytest.approx(211, rel=0.03)  # 211.1


# ---- Arrivals


@pytest.mark.parametrize("variation", [0.3, 1.0, 3.0])
def test_arrivals_have_the_rate_and_the_burstiness(variation: float) -> None:
    times = arrivals.gamma(40_001, 2.5, variation, seed=1)
    gaps = [b - a for a, b in itertools.pairwise(times)]
    assert times[0] == 0
    assert min(gaps) >= 0
    assert statistics.mean(gaps) == pytest.approx(0.4, rel=0.05)
    assert statistics.stdev(gaps) == pytest.approx(0.4 * variation, rel=0.05)
    assert arrivals.gamma(5, 2.5, variation, seed=1) == times[:5]


@given(
    st.lists(st.integers(0, 10**9).map(lambda ms: ms / 1000), min_size=2, max_size=50, unique=True),
    st.floats(0.01, 100),
)
def test_a_replay_has_the_rate_and_the_shape_of_what_was_recorded(recorded: list[float], rate: float) -> None:
    recorded.sort()
    replayed = arrivals.replay(recorded, rate)
    span = recorded[-1] - recorded[0]
    assert replayed[0] == 0
    assert replayed[-1] == pytest.approx((len(recorded) - 1) / rate)
    shares = [(time - recorded[0]) / span for time in recorded]
    assert [time / replayed[-1] for time in replayed] == pytest.approx(shares, abs=1e-9)


def test_arrivals_that_cannot_be() -> None:
    with pytest.raises(ValueError, match="poisson arrivals need a rate"):
        Arrivals(kind="poisson")
    with pytest.raises(ValueError, match="closed, poisson, gamma or trace"):
        Arrivals(kind="often")
    for rate in (2.0, None):
        with pytest.raises(ValueError, match="cannot be replayed"):
            arrivals.replay([1.0, 1.0], rate)


# ---- Workloads


def lengths(workload: Workload, count: int, seed: int = 0) -> list[tuple[int, int]]:
    sessions = workload.sessions(count, CLOSED, seed)
    return [(turn.prompt_tokens, turn.max_tokens) for session in sessions for turn in session.turns]


def test_the_papers_workload_is_text_of_the_lengths_it_says(smollm2: Path) -> None:
    workload, tokenizer = Workload("paper", smollm2), Tokenizer(smollm2)
    sessions = workload.sessions(60, Arrivals(rate=3.0), seed=5)
    assert sessions == workload.sessions(60, Arrivals(rate=3.0), seed=5)
    assert sessions[:20] == workload.sessions(20, Arrivals(rate=3.0), seed=5)
    other = workload.sessions(60, Arrivals(rate=3.0), seed=6)
    assert all(a.turns != b.turns and (a.at != b.at or a.at == 0) for a, b in zip(sessions, other, strict=True))
    for (turn,) in (session.turns for session in sessions):
        assert len(tokenizer.encode(turn.prompt)) == turn.prompt_tokens
        assert 32 <= turn.prompt_tokens <= 512
        assert 1 <= turn.max_tokens <= 128


def test_homogeneous_scaled_and_limited(tiny_llama: Path) -> None:
    assert set(lengths(Workload("homogeneous:32,20", tiny_llama), 5)) == {(32, 20)}
    assert set(lengths(Workload("homogeneous:32,20", tiny_llama, scale=0.25), 5)) == {(8, 5)}
    limited = Workload("uniform:1-100,1-100", tiny_llama, limit=60)
    assert max(prompt + output for prompt, output in lengths(limited, 50)) <= 60
    assert limited.left_out > 20


def test_a_trace_keeps_order_and_times_and_leaves_out_what_is_too_long(azure: Path, tiny_llama: Path) -> None:
    workload = Workload(f"trace:{azure}", tiny_llama, limit=600)
    assert lengths(workload, 3) == [(374, 44), (396, 109), (91, 16)]
    assert workload.left_out == 1
    as_recorded = [session.at for session in workload.sessions(3, Arrivals(kind="trace"))]
    assert as_recorded == pytest.approx([0, 4.224579, 10])
    twice_a_second = [session.at for session in workload.sessions(3, Arrivals(kind="trace", rate=2.0))]
    assert twice_a_second == pytest.approx([0, 0.4224579, 1])
    assert lengths(Workload(f"trace:{azure},2", tiny_llama), 2) == [(879, 55), (91, 16)]
    with pytest.raises(ValueError, match="only 3 requests of at most 600 tokens"):
        workload.sessions(4, CLOSED)


def test_shared_prefixes_are_shared_within_a_group(tiny_llama: Path) -> None:
    sessions = Workload("shared-prefix:2,40,10,5", tiny_llama).sessions(20, CLOSED)
    prompts = [session.turns[0].prompt for session in sessions]
    assert len({prompt[:40] for prompt in prompts}) == 2  # a token is a byte here
    assert len(set(prompts)) == 20
    assert {len(prompt) for prompt in prompts} == {50}
    assert set(lengths(Workload("shared-prefix:2,40,10,6", tiny_llama, scale=0.5), 5)) == {(25, 3)}


def test_chats_have_turns_and_pauses(tiny_llama: Path) -> None:
    sessions = Workload("chat:4,12,6,0.5", tiny_llama).sessions(50, CLOSED)
    assert {len(session.turns) for session in sessions} == {1, 2, 3, 4}
    assert all(session.chat and not session.turns[0].pause for session in sessions)
    pauses = [turn.pause for session in sessions for turn in session.turns[1:]]
    assert statistics.mean(pauses) == pytest.approx(0.5, rel=0.5)


@pytest.mark.parametrize(
    ("specification", "what"),
    [
        ("nothing", "no workload 'nothing'"),
        ("homogeneous:1", "workload 'homogeneous:1' is no homogeneous:PROMPT,OUTPUT"),
        ("uniform:1-x,2-3", "invalid literal"),
        ("fit:nobody", "no fit 'nobody'; there are azure-conv-2023"),
        ("chat:0,1,1,1", "at least 1 turn"),
        ("chat:2,400,200,1", "every request has 632 tokens, and --limit is 600"),
        ("shared-prefix:2,400,100,101", "every request has 601 tokens, and --limit is 600"),
    ],
)
def test_workloads_that_cannot_be_read(tiny_llama: Path, specification: str, what: str) -> None:
    with pytest.raises(ValueError, match=what):
        Workload(specification, tiny_llama, limit=600)
