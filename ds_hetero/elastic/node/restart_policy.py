"""Decide whether a job whose workers failed begins another round. It ends if the round would fail the same way.

reason of the failure                                      the job
a refusal (wrong setting, unknown model)                   ends
the same error as before, without a step in between        ends
10 rounds of the same agents, none with a step             ends
anything else, such as the loss of a peer                  goes on
"""

from __future__ import annotations

from ds_hetero.elastic.node.messages import LastWords

_MAX_ROUNDS_IN_VAIN = 10  # chosen; each costs the start of the workers, some 20 s


class RestartPolicy:
    """Failures of the rounds so far."""

    def __init__(self) -> None:
        self._rounds_in_vain = 0  # rounds of the same agents without a step, in a row
        self._has_stepped = False  # whether a worker of the latest round did a step
        self._latest_error = ""
        self._latest_failure: dict[str, tuple[int, int]] = {}  # (round, step) by the text of the error

    def note_end(self, last: LastWords, number: int) -> str | None:
        """Record that an agent's workers ended in round ``number``. Return why the job must end; None to go on."""
        self._has_stepped |= bool(last.get("has_stepped"))
        self._latest_error = last.get("error", self._latest_error)
        error = last.get("error")
        step = int(last.get("step", -1))
        if not error or last.get("is_of_peer"):
            return None
        if last.get("is_refusal"):
            return error
        previous_round, previous_step = self._latest_failure.get(error, (number, -1))
        # Several agents of one round may report the same error: that is one failure.
        is_repeated = previous_round < number and step <= previous_step
        if is_repeated:
            return f"the same error ended the workers twice at step {max(step, 0)}: {error}"
        self._latest_failure[error] = number, step
        return None

    def note_begin(self, num_agents: int, *, has_same_agents: bool) -> str | None:
        """Record that a round is about to begin. Return why the job must end instead; None if the round may begin.

        Args:
            has_same_agents: this server began the previous round with the same agents.
        """
        is_again = has_same_agents and not self._has_stepped
        self._rounds_in_vain = self._rounds_in_vain + 1 if is_again else 0
        if self._rounds_in_vain == _MAX_ROUNDS_IN_VAIN:
            return (
                f"{_MAX_ROUNDS_IN_VAIN} rounds of the same {num_agents} agents ended before a step; the latest error "
                f"was: {self._latest_error or 'none, the workers were killed'}. Their state stays in memory: start the "
                "same command again when the cause is removed."
            )
        self._has_stepped = False
        return None
