"""Whether a job that fails begins another round: not where that would end in the same way.

what ended the workers                                     the job
a refusal (a wrong setting, a model that is not known)     ends
the same error as before, and no step in between           ends
10 rounds of the same agents, none of which did a step     ends
anything else, such as the loss of a peer                  goes on
"""

from __future__ import annotations

from ds_hetero.elastic.node.messages import LastWords

_MAX_ROUNDS_IN_VAIN = 10  # chosen; each costs the start of the workers, some 20 s


class RestartPolicy:
    """Failures of the rounds so far."""

    def __init__(self) -> None:
        self._rounds_in_vain = 0  # of the same agents in a row, the latest one included, unless it has stepped
        self._has_stepped = False  # a worker of the latest round
        self._latest_error = ""
        self._latest_failure: dict[str, tuple[int, int]] = {}  # round and step, by the text of the error

    def note_end(self, last: LastWords, number: int) -> str | None:
        """The workers of an agent have ended in a round. Return why the job must end; None if it may go on."""
        self._has_stepped |= bool(last.get("has_stepped"))
        self._latest_error = last.get("error", self._latest_error)
        error, step = last.get("error"), int(last.get("step", -1))
        if not error or last.get("is_of_peer"):
            return None
        if last.get("is_refusal"):
            return error
        round_before, step_before = self._latest_failure.get(error, (number, -1))
        # All agents of one round may report the same error: that is one failure.
        is_repeated = round_before < number and step <= step_before
        if is_repeated:
            return f"the same error ended the workers twice at step {max(step, 0)}: {error}"
        self._latest_failure[error] = number, step
        return None

    def note_begin(self, num_agents: int, *, of_same_agents: bool) -> str | None:
        """A round is about to begin. Return why the job must end instead; None if it may begin.

        Args:
            of_same_agents: this server has begun the round before, with the same agents.
        """
        is_again = of_same_agents and not self._has_stepped
        self._rounds_in_vain = self._rounds_in_vain + 1 if is_again else 0
        if self._rounds_in_vain == _MAX_ROUNDS_IN_VAIN:
            return (
                f"{_MAX_ROUNDS_IN_VAIN} rounds of the same {num_agents} agents ended before a step; the latest error "
                f"was: {self._latest_error or 'none, the workers were killed'}. Their state stays in memory: start the "
                "same command again when the cause is gone."
            )
        self._has_stepped = False
        return None
