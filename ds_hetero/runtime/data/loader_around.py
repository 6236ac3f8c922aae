"""Base class of loaders that wrap another loader."""

from __future__ import annotations

from typing import Any


class LoaderAround:
    """A loader that wraps ``dataloader`` and passes on its length and every attribute that it does not define."""

    dataloader: Any

    def __len__(self) -> int:
        return len(self.dataloader)

    def __getattr__(self, name: str) -> Any:
        if name == "dataloader":  # looked up by copy before there is any attribute
            raise AttributeError(name)
        return getattr(self.dataloader, name)
