"""Where do logged values go? Lines in the run directory always, other trackers through a protocol of two methods."""

from allranks.metrics.sinks import JsonLines as JsonLines
from allranks.metrics.sinks import Sink as Sink
from allranks.metrics.sinks import TensorBoard as TensorBoard
from allranks.metrics.sinks import default_sinks as default_sinks
