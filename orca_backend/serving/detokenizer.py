"""Token ids to text while they arrive: text that is released never changes, and the pieces join to the whole.

Tokens are decoded with a little context (two offsets, as vLLM and TGI do it), since what a token means may depend on
the ones before it. Text is held back while it ends in an incomplete UTF-8 sequence, and while it may be the beginning
of a stop string. Tokens are taken one by one, so that the text does not depend on how they were grouped on their way.
"""

from __future__ import annotations

from collections.abc import Callable

REPLACEMENT = "\ufffd"
_CONTEXT = 4  # prompt tokens that the first output token is decoded with


class Detokenizer:
    """The text of one generation.

    `decode` turns token ids into text. `prompt_ids` only give context: they are never released, and stop strings in
    them do not count. Stop strings count once more than `min_tokens` tokens have come; the text ends before the stop
    string, or after it with `include_stop`.
    """

    def __init__(
        self,
        decode: Callable[[list[int]], str],
        prompt_ids: list[int],
        stop: list[str],
        *,
        include_stop: bool = False,
        min_tokens: int = 0,
    ) -> None:
        """Start after the prompt, with no text."""
        self._decode = decode
        self._stop = stop
        self._include_stop = include_stop
        self._min_tokens = min_tokens
        self._hold = 0 if include_stop else max((len(s) for s in stop), default=1) - 1
        self._window = list(prompt_ids[-_CONTEXT:])  # context, then the tokens whose text is not final
        self._read = len(self._window)  # where the context ends
        self._context_text = decode(self._window) if self._window else ""
        self._tail = ""  # final text that is held back for stop strings, or just released and still searched
        self._released = 0  # characters of the tail that are released
        self._unsearchable = 0  # characters of the tail in which no stop string may end (min_tokens)
        self.num_tokens = 0
        self.stopped = False

    def append(self, token_id: int) -> str:
        """Take one more token; return the text that it makes final, often empty. Sets `stopped` at a stop string.

        After that no more tokens may come.
        """
        self.num_tokens += 1
        self._window.append(token_id)
        text = self._decode(self._window)
        if len(text) <= len(self._context_text) or text.endswith(REPLACEMENT):
            return self._grow("", self._hold)
        new = text[len(self._context_text) :]
        del self._window[: self._read]
        self._read = len(self._window)
        self._context_text = self._decode(self._window)
        return self._grow(new, self._hold)

    def count(self) -> None:
        """Take a token that has no text of its own: the stop token at the end."""
        self.num_tokens += 1

    def finish(self) -> str:
        """The rest: everything that was held back, incomplete UTF-8 included (as U+FFFD). Empty after a stop."""
        if self.stopped:
            return ""
        rest = self._decode(self._window)[len(self._context_text) :] if len(self._window) > self._read else ""
        return self._grow(rest, hold=0)

    def _grow(self, new: str, hold: int) -> str:
        """Append final text, look for stop strings that end in it, and release all but the last `hold` characters."""
        if not self._stop:
            return new
        self._tail += new
        if self.num_tokens <= self._min_tokens:
            self._unsearchable = len(self._tail)
        elif new and (end := self._find_stop(len(self._tail) - len(new))) is not None:
            self.stopped = True
            return self._tail[self._released : max(end, self._released)]
        end = max(len(self._tail) - hold, self._released)
        released = self._tail[self._released : end]
        surplus = max(len(self._tail) - max(len(s) for s in self._stop) + 1, 0)  # no stop string can begin there now
        surplus = min(surplus, end)
        self._tail = self._tail[surplus:]
        self._released = end - surplus
        self._unsearchable = max(self._unsearchable - surplus, 0)
        return released

    def _find_stop(self, searched: int) -> int | None:
        """Where the text ends because of a stop string that ends after `searched` characters of the tail; or None.

        Of several the one that begins first counts, and of those the shortest.
        """
        earliest_end = max(searched, self._unsearchable) + 1
        found = [
            (begin, begin + len(stop))
            for stop in self._stop
            if (begin := self._tail.find(stop, max(earliest_end - len(stop), 0))) >= 0
        ]
        if not found:
            return None
        begin, end = min(found)
        return end if self._include_stop else begin
