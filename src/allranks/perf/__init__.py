"""Where did the time of a run go? Its history, the parts of its steps, and what makes it slow. No torch here.

read_history(RUN)      what the agents wrote under RUN/timeline/
breakdown(history)     the parts of a step, per rank
over_time(history, waits)     the same, in pieces of time
causes.find_causes(View(history))   what makes it slow, with numbers and what to change
"""

from __future__ import annotations
