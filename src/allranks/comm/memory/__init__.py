"""Sums over the ranks of one host through shared memory, and how their memory is opened."""

from allranks.comm.memory.opening import Refused as Refused
from allranks.comm.memory.opening import open_memory as open_memory
from allranks.comm.memory.opening import why_not_here as why_not_here
from allranks.comm.memory.summing import MemorySum as MemorySum
from allranks.comm.memory.waiting import leave_all as leave_all
