"""What a run leaves behind: events on disk, and the record that they fold into. Never imports torch."""

from mpx.record.directory import RunDirectory
from mpx.record.find import find_run
from mpx.record.fold import fold
from mpx.record.model import RunRecord
from mpx.record.parts import Finding
from mpx.record.series import Durations, Thinned
from mpx.record.shards import ShardWriter

__all__ = ["Durations", "Finding", "RunDirectory", "RunRecord", "ShardWriter", "Thinned", "find_run", "fold"]
