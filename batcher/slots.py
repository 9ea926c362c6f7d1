"""The columns of a slot's state on the device."""

from __future__ import annotations

from batcher.sampling_table import PARAMETERS, Column

_FIRST = 3


def _starts() -> tuple[dict[str, int], int]:
    """The start of each sampling column by name, and the end of the last one."""
    starts, end = {}, _FIRST
    for column in sampling_columns():
        starts[column.name] = end
        end += column.width
    return starts, end


def sampling_columns() -> list[Column]:
    """The columns that hold a request's sampling parameters, in their order."""
    return [column for parameter in PARAMETERS.values() for column in parameter.columns]


class SlotLayout:
    """Columns of the slot state `i32[num_slots, width]`. Numbers of other types are held as their 32 bits."""

    LAST_TOKEN = 0  # the token that the next step reads if the host sends -1
    KV_LEN = 1  # tokens of this request whose K/V are in pages
    ADAPTER = 2  # the adapter slot of its LoRA adapter; 0: the base model
    STARTS, PAGE_TABLE = _starts()  # of the sampling columns by name; [pages_per_seq], never read past the row's pages

    @staticmethod
    def at(name: str) -> int:
        """The first column of a sampling parameter's `Column`."""
        return SlotLayout.STARTS[name]

    @staticmethod
    def width(pages_per_seq: int) -> int:
        """The i32 numbers of one slot's state."""
        return SlotLayout.PAGE_TABLE + pages_per_seq
