"""torchrun's agent of one GPU, started by `launch`: ends with its parent, and prints why it ends.

python -m ds_hetero.elastic.node.agent TORCHRUN_ARGUMENTS

exit code    reason
0            the script has finished
1            the workers failed, and are not restarted
2            the rendezvous was closed, such as by a refusal
143          preemption notice (128 + SIGTERM)
"""

from __future__ import annotations

import logging
import sys

from torch.distributed import run
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import RendezvousClosedError, RendezvousHandler, RendezvousParameters
from torch.distributed.elastic.rendezvous import rendezvous_handler_registry as registry

from ds_hetero.elastic.node.processes import end_with_parent
from ds_hetero.elastic.node.rendezvous import AGENT_BACKEND, ENDED_WELL, create_handler

EXIT_CODE_NOTICE = 143
EXIT_CODE_CLOSED = 2

_handlers: list[RendezvousHandler] = []


def _create(params: RendezvousParameters) -> RendezvousHandler:
    """Create a handler, and remember it for the shutdown at the end."""
    _handlers.append(create_handler(params))
    return _handlers[-1]


def main() -> None:
    """Run torchrun with the handler registered, whether or not the package's entry points are installed."""
    end_with_parent()
    logging.getLogger("torch.distributed.elastic").setLevel(logging.ERROR)
    registry.register(AGENT_BACKEND, _create)
    try:
        run.main()
    except SignalException:
        sys.exit(EXIT_CODE_NOTICE)
    except RendezvousClosedError as error:
        if str(error) == ENDED_WELL:
            return
        print(f"ds_hetero: {error}", file=sys.stderr, flush=True)
        sys.exit(EXIT_CODE_CLOSED)
    except ChildFailedError as error:
        print(f"ds_hetero: {error}", file=sys.stderr, flush=True)
        sys.exit(1)
    finally:
        for handler in _handlers:
            handler.shutdown()


if __name__ == "__main__":
    main()
