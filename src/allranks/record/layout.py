"""Where does each thing lie in a record page?

A page is one mapped file of 32 KiB, `$ALLRANKS_RECORD_DIR/<pid>.page`: 4096 words of 8 bytes, native byte
order, signed. One process writes it and any may read it; only ASK and SAMPLE_UNTIL_NS are written by readers. What keeps a
reader from half-written things: one fact is one word, and a word is stored at once; a phase and its line
share a word; a slot of the ring of collectives carries its number first and last, a string its number
first: a torn one is left out. There is no lock, so a stopped writer blocks nobody.

This module is imported at the start of every Python process of a job: no imports.
"""

MAGIC = 0x314B4E41524C4C41  # b"ALLRANK1", little-endian
VERSION = 4
WORDS = 4096
PAGE_BYTES = WORDS * 8
SUFFIX = ".page"
STACK_SUFFIX, ENTRIES_SUFFIX, MODELS_SUFFIX = ".stack", ".fr.json", ".models.jsonl"
SUMS_SUFFIX, NAMES_SUFFIX, NOTES_SUFFIX = ".sums", ".names.json", ".notes.jsonl"
ALL_SUFFIXES = (SUFFIX, STACK_SUFFIX, ENTRIES_SUFFIX, MODELS_SUFFIX, SUMS_SUFFIX, NAMES_SUFFIX, NOTES_SUFFIX)


def stack_signal() -> int:
    """The signal that asks a process for its stacks: SIGRTMAX - 3, 61 on Linux; 0 where there is none (macOS).

    A real-time signal, since SIGUSR1 and SIGUSR2 belong to the user; not one of glibc's (32, 33), nor the first or
    last ones that debuggers take.
    """
    import _signal  # pyright: ignore[reportMissingImports] - signal itself costs 2 ms at every start

    return getattr(_signal, "SIGRTMAX", 3) - 3


def preference(step: int) -> int:
    """Which steps are timed where not all can be: those of high preference, the same ones on every rank.

    Half of all steps have 0, a quarter 1, ...; spread evenly but without a period (multiples of the golden ratio: those of
    preference 3 are 5, 8 or 13 apart), since much in a loop has one (loader workers take turns).
    """
    return 32 - (step * 2654435761 & 0xFFFFFFFF).bit_length()


# So often is a step timed (asking torch when the last gradient came takes 30 us where its code is not in the cache), and one of quick steps
# looked at, which takes 0.2 ms there: one of 128 where they are quickest, and half of those after the first thousand.
TIMED_EVERY_NS, MAX_PREFERENCE = 100_000_000, 8
EARLY_STEPS, EARLY_PREFERENCE = 1024, 7


def next_timed(step: int, length_ns: int) -> int:
    """The next step to be timed after `step`, where a step takes `length_ns`."""
    least = min(EARLY_PREFERENCE, (max(0, TIMED_EVERY_NS - 1) // max(1, length_ns)).bit_length())
    is_quickest = least == EARLY_PREFERENCE and step >= EARLY_STEPS
    return next_preferred(step, MAX_PREFERENCE if is_quickest else least)


def next_preferred(step: int, least: int) -> int:
    """The next step after `step` of a preference of at least `least`."""
    most = 1 << 32 - least
    # The lines of `preference`; to try all steps up to the next one takes 12 us where one of 64 is preferred.
    if step * 2654435761 & 0xFFFFFFFF < most:
        for apart in _APART[least]:
            if (step + apart) * 2654435761 & 0xFFFFFFFF < most:
                return step + apart
    step += 1
    while step * 2654435761 & 0xFFFFFFFF >= most:
        step += 1
    return step


# How far apart two steps may be of which both have a preference of at least 0, 1, 2, ... and none between (the three-gap theorem).
_APART = (
    (1,),
    (1, 2, 3),
    (2, 3, 5),
    (5, 8, 13),
    (8, 13, 21),
    (21, 34, 55),
    (34, 55, 89),
    (89, 144, 233),
    (144, 233, 377),
)


# Phases. PYTHON is the user's code between the calls that are marked; UNMARKED, which W_PHASE never has, the time of light marks.
START, IMPORT, INIT, BUILD, PYTHON, DATA, FORWARD, BACKWARD = range(8)
OPTIMIZER, COLLECTIVE, CHECKPOINT, EVALUATE, EXIT, COPY, LOG, UNMARKED = range(8, 16)
NUM_PHASES = 16

# Roles.
OTHER, RANK_ROLE, LOADER_WORKER = range(3)

# FLAGS bits.
TORCH_IMPORTED, PROBED, LIBRARY_STEPS, IN_PROCESS, STEPPED_ASIDE, FORKED = (1 << bit for bit in range(6))

# How the process went (EXIT_KIND).
NOT_ENDED, ENDED, ENDED_BY_EXCEPTION, SYSTEM_EXIT, HARD_EXIT = range(5)

# Single words.
W_MAGIC, W_VERSION, W_PID, W_PARENT, W_START_NS, W_START_UNIX_NS = range(6)
W_ROLE, W_RANK, W_WORLD_SIZE, W_LOCAL_RANK, W_WORKER_ID, W_STACK_SIGNAL, W_FLAGS = range(6, 13)
W_TICKS, W_TICK_NS, W_ASK, W_ANSWERED = range(13, 17)
W_SINCE_NS, W_PHASE = 17, 18  # W_PHASE: number of the line << 8 | phase
W_STEP, W_MICRO_STEP, W_EPOCH = range(19, 22)
W_SEEN = 22  # as W_PHASE: what the tick thread saw last on the stack of a process whose marks are light
W_ISSUED, W_GROUP_SEQ, W_STEP_SEQ, W_DESTROYED_NS = range(23, 27)
W_EXIT_KIND, W_EXIT_CODE, W_EXIT_LINE, W_EXIT_NS = range(27, 31)
W_LAST_GRAD, W_UNUSED, W_MODELS, W_MODEL_PARAMS, W_MODEL_HASH = range(31, 36)
W_GROUPS, W_STEP_ISSUED, W_SEQ_STEP, W_LIGHT = range(36, 40)  # W_LIGHT: W_PHASE is not kept now (light.py)

# A loader: the current one, and the one before it.
LOADER, LOADER_BEFORE = 40, 48
L_NUMBER, L_DRAWN, L_LENGTH, L_LINE, L_NUM_WORKERS, L_STARTED_NS, L_ENDED_NS = range(7)
LOADER_PIDS, NUM_LOADER_PIDS = 56, 32

CUM_NS = 88  # NUM_PHASES words
STEP_ENDS, NUM_STEP_ENDS = 104, 32  # monotonic ns of the end of step k at k % 32
SAMPLE_COUNT, SAMPLE_TASK, SAMPLE_INDEX, SAMPLE_NS, SAMPLES, NUM_SAMPLES = 136, 137, 138, 139, 140, 16

# The ring of collectives.
RING, NUM_SLOTS, SLOT_WORDS, NUM_DIMS = 160, 32, 24, 6
S_HEAD, S_GROUP, S_OP, S_REDUCE, S_ROOT, S_DTYPE, S_NDIM, S_DIMS = range(8)
S_NUMEL, S_LINE, S_THREAD, S_SEQ, S_ENTERED, S_EXITED, S_STEP, S_FLAGS, S_RANKS, S_TENSORS = range(13, 23)
S_TAIL = 23
ASYNC, WAITED, FAILED = 1, 2, 4  # S_FLAGS bits

# Texts of fixed place: kind-or-number, ns, length, bytes.
EXCEPTION, THREAD_EXCEPTION, LAST_WORDS_WORDS = 928, 1024, 96
HOST, HOST_WORDS = 1120, 8
COMMAND, COMMAND_WORDS = 1128, 48

# The first loss that was not finite; N_STEP, which is written last, counts the step it was in: 1 = the first.
NOT_FINITE = 1184
N_STEP, N_KIND, N_LINE, N_NS, N_SOUND = range(5)  # N_SOUND: the last step that was looked at and was well
NAN, PLUS_INF, MINUS_INF = 1, 2, 3  # N_KIND

# The last fingerprints of the replicas, a ring: step first and last, as in the ring of collectives.
CHECKS, NUM_CHECKS, CHECK_WORDS = 1192, 16, 4
C_STEP, C_SEQ, C_HASH, C_TAIL = range(4)

# Strings written once and named by number: number, length, bytes, padded to a word.
STRINGS, STRINGS_END = 1256, 3072
MAX_STRING_BYTES = 240

# Times brought here by the tick thread, of one moment: that moment first and last. T_LOSS is in millionths.
TIMES, TIMES_WORDS = 3072, 28
T_HEAD, T_STEP, T_BUFFERS_NS, T_EXCHANGED_NS, T_EXCHANGED_OF_NS, T_HAS_LOSS, T_LOSS = range(7)
T_PHASES, T_TAIL = 8, 27  # T_PHASES: NUM_PHASES words, the phase that goes on counted until that moment

STEP_ENDED = 3100  # the step of the last end in STEP_ENDS: the ends of light steps come later

# The moments of timed steps, a ring: number of the step first and last, as in the ring of collectives.
TIMED, NUM_TIMED, TIMED_WORDS = 3104, 64, 14
M_STEP, M_START, M_DATA_FROM, M_DATA_TO, M_FORWARD_FROM, M_FORWARD_TO, M_BUFFERS_FROM, M_BUFFERS_TO = range(8)
M_BACKWARD_FROM, M_READY, M_BACKWARD_TO, M_OPTIMIZER_FROM, M_END, M_TAIL = range(8, 14)

# Two lines that W_SEEN names in turn, as strings are named: any line may be seen, and all would fill the room for strings.
SEEN, SEEN_WORDS = 4000, 32

# Where the thread that trains was seen while somebody wants to know that (sampled.py), a ring; each as W_PHASE.
W_SAMPLE_UNTIL_NS, W_NUM_SAMPLED = 4064, 4065
SAMPLED, NUM_SAMPLED = 4066, 30
