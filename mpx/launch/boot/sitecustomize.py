"""The first lines of every Python process of a run: `mpx run` puts this folder, and nothing else, on PYTHONPATH.

Any interpreter may find it there, with mpx or without: hence a syntax that every Python reads, and nothing imported but
os and sys. A process that never imports torch sees no difference.
"""

import os
import sys


class _Skipped:
    """Finds nothing, and says so when torch is asked for: mpx cannot follow this process."""

    def __init__(self, reason):
        self.text = "%s (process %d) runs torch without mpx: %s" % (sys.executable, os.getpid(), reason)

    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            sys.meta_path.remove(self)
            try:
                os.write(2, ("mpx: %s\n" % self.text).encode("utf-8", "replace"))
                if os.environ.get("MPX_RUN"):
                    self.note(os.path.join(os.environ["MPX_RUN"], "events"))
            except OSError:
                pass  # the script's import goes on whether or not there is anybody to tell

    def note(self, shards):
        import json
        import time

        name = "skipped-%d-%d.jsonl" % (os.getpid(), time.time() * 1e9)
        with open(os.path.join(shards, name), "w") as shard:
            event = {"event": "skipped", "t": time.time(), "pid": os.getpid(), "text": self.text}
            shard.write(json.dumps(event) + "\n")


def _boot():
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry) != here]
    sys.path_importer_cache.pop(here, None)
    if os.environ.get("MPX_DISABLE", "") in ("", "0") and sys.version_info >= (3,):
        try:
            if not os.environ.get("MPX_RUN"):
                raise ImportError("MPX_RUN did not arrive in its environment")
            if sys.version_info < (3, 10):
                raise ImportError("it is older than Python 3.10")
            from mpx.launch.torch_import import follow

            follow(os.environ["MPX_RUN"])
        except ImportError as error:
            sys.meta_path.insert(0, _Skipped(error))
    # The user's own sitecustomize, which this one hides, runs as if this one were not there. If there is none, this one
    # stays in sys.modules: the import system looks for it there once its last line has run.
    own = sys.modules.pop(__name__)
    try:
        import sitecustomize  # noqa: F401
    except ImportError as error:
        if getattr(error, "name", __name__) != __name__:
            raise
    finally:
        sys.modules.setdefault(__name__, own)


_boot()
