"""What does a run directory tell after the job, or while it goes on? As text, JSON, one page, or a trace. No torch here.

find(RUN, home)      which directory is meant
make(run, now)       everything that is said, as values
as_text, as_json, as_page, as_trace
"""

from __future__ import annotations
