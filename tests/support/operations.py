"""Operations of torch that a test sees as they run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode


class Watch(TorchDispatchMode):
    """Calls a function with each operation that runs within it, its arguments (those by keyword last) and its result."""

    supports_higher_order_operators = True

    def __init__(self, see: Callable[[Any, Any, Any], object]) -> None:
        super().__init__()
        self.see = see

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        self.see(func, (*args, *kwargs.values()), result)
        return result
