"""docs/numerics.md, made from the results of bench/quality.py so that the two cannot differ."""

from __future__ import annotations

from typing import Any

INTRODUCTION = """\
# Numerics: what precision costs

<!-- Made by `make bench-quality` from bench/results/quality.json. Do not edit: change bench/numerics.py. -->

The plain-torch path in fp32 is the specification: its greedy tokens equal those of `transformers` one by one. This
page says how far every other precision and path is from it, with {model}, measured on {date} ({processor}).

- **plain torch** runs anywhere. **compiled** is the program of fused operations for CPUs with AVX-512.
"""

QUANTIZATIONS = {
    "int8": """\
- **int8** computes every product of a layer, and the head, in 8-bit integers: weights are rounded on load, one scale
  for each output and group of 64 inputs; activations are rounded per token and group as they come. Sums within a group
  are exact, the rest of the computation is bf16. A tied embedding is read from the 8-bit head.
""",
    "int8_weight": """\
- **int8_weight** keeps the weights of the layers like that and expands them to bf16 to multiply; activations, the head
  and the embedding are not rounded.
""",
    "int4_weight": """\
- **int4_weight** is the same in 4 bits, which count from the smallest weight of a group to its largest: a scale and an
  offset for each output and group of 32 inputs. SmolLM2 as `make model` imports it comes from a file of just such
  weights (Q4_1), so its row says that they are found again, and nothing about what other weights lose.
""",
    "int8 K/V": """\
- **int8 K/V** (`kv_cache.dtype: int8`) keeps keys and values in 8 bits, with an fp32 scale for each token and head: 68
  bytes for a head of 64 instead of 128. Everything else is as it is without; sums are in fp32.
""",
}

LIKELIHOODS = """\
## At equal prefixes

Every text is cut into chunks of {chunk} tokens that are judged without context; {tokens} tokens in all. The error is
that of the log-probability (in nats) of the token that really comes, against the specification; the divergence
(Kullback-Leibler, in nats) is the mean over all positions and weighs the whole distribution. The smaller the better.
"""

GREEDY = """\
## Greedy answers

{answers} prompts of {prompt_tokens} tokens from the same texts, {tokens} tokens each, all in one batch of a real engine
process, ends of sequence ignored. Answers part for good at the first token that is nearly a draw, and a different
order of the same sums is enough for that, so this says more about how often the model is undecided than about quality.
"""

PRACTICE = """\
## What follows

- Exactness is tested in fp32, where every path must give the specification's tokens. bf16, quantized weights
  and int8 K/V are judged by the tables here.
- `make bench-quality` fails if the perplexity of int8 is more than 1 % away from that of bf16.
"""


def render(result: dict[str, Any]) -> str:
    """The document."""
    variants = result["variants"]
    bf16 = variants[result["bf16"]]["perplexity"]
    tokens = sum(text["tokens"] for text in result["texts"])
    greedy = result["greedy"]
    introduction = INTRODUCTION.format(
        model=result["model"], date=result["date"], processor=result["machine"]["processor"]
    )
    sections = [
        introduction + "".join(text for name, text in QUANTIZATIONS.items() if name in variants),
        LIKELIHOODS.format(chunk=result["chunk"], tokens=f"{tokens:,}"),
        _table(
            ["", "perplexity", "against bf16", "error: mean", "p99", "max", "divergence", "same most likely token"],
            [
                [
                    name,
                    f"{of['perplexity']:.3f}",
                    f"{of['perplexity'] / bf16 - 1:+.2%}",
                    *(f"{of['log-probability error'][key]:.2g}" for key in ("mean", "p99", "max")),
                    f"{of['divergence']:.1e}",
                    f"{of['same most likely token']:.2%}",
                ]
                for name, of in variants.items()
            ],
        ),
        "Perplexity by text:\n",
        _table(
            ["", *(text["kind"] for text in result["texts"])],
            [[name, *(f"{value:.3f}" for value in of["by text"].values())] for name, of in variants.items()],
        ),
        GREEDY.format(answers=greedy["answers"], prompt_tokens=greedy["prompt tokens"], tokens=greedy["tokens"]),
        _table(
            [
                "",
                *(
                    f"{what}, {against}"
                    for against in ("fp32", "bf16")
                    for what in ("equal tokens", "answers", "first")
                ),
            ],
            [
                [
                    name,
                    *(
                        cell
                        for against in ("the specification", "bf16")
                        for cell in _agreement(of[f"agreement with {against}"], greedy)
                    ),
                ]
                for name, of in variants.items()
            ],
        ),
        "Against the specification (fp32) and against the compiled bf16: the share of positions with the same token; "
        "answers\nthat are equal from end to end; and the position of the first difference (median).\n",
        PRACTICE,
        "## The texts\n",
        _table(
            ["", "source", "tokens", "SHA-256 of the file"],
            [[text["kind"], text["source"], str(text["tokens"]), text["sha256"][:16]] for text in result["texts"]],
            left=2,
        ),
    ]
    return "\n".join(sections)


def _agreement(of: dict[str, float], greedy: dict[str, int]) -> list[str]:
    first = of["until first difference"]
    return [
        f"{of['equal tokens']:.1%}",
        f"{of['equal answers']} of {greedy['answers']}",
        "none" if first == greedy["tokens"] else f"{first:g}",
    ]


def _table(header: list[str], rows: list[list[str]], left: int = 1) -> str:
    rule = ["---"] * left + ["---:"] * (len(header) - left)
    return "".join(f"| {' | '.join(cells)} |\n" for cells in [header, rule, *rows])
