/* How do the marks of quick steps count without running any Python, and the record's thread tick?

   Between torch's own calls nothing of ours is in the processor's cache, and there a Python call costs 1.5 to 3 us. So what a light mark
   does (light.py) is here once more: it counts, in fields of one object, and passes on. All else stays in Python: where something is due, or
   marks are not light, the Python function is called as if this file were not there, and without it every mark is that function.

   A marked function stays the Python function that it is (inspect, pickle and torch.compile see no difference); only its vectorcall is
   replaced, as PyFunction_SetVectorcall is for. Forward and next batch are called from C; backward is not, see `Front`. Hooks of optimizers are
   builtin functions.

   Everything runs under the GIL, and nothing here gives it up in the middle of counting; but for the ticks (`Pace`), which look at the counts. */

#include <Python.h>
#include <pythread.h>
#include <structmember.h>
#include <time.h>

#define VERSION 3 /* as in counts.py; goes up with what is called from there, since an editable install may have an older one */

#define QUICK_STEP_NS 6000000LL /* as in counts.py */

#ifdef Py_GIL_DISABLED
#error "counts are kept under the GIL; without it the marks are those in Python"
#endif

/* ---- what light marks count ---------------------------------------------------------------------------------------------------- */

typedef struct {
    PyObject *view; /* as it was set */
    Py_buffer memory;
} Words;

typedef struct {
    PyObject_HEAD
    /* In the order in which a step touches them: what it costs are lines of the cache. */
    char is_on;
    char is_hook_counted;
    long long iterator, drawn;
    volatile long long *drawn_at; /* in the page; NULL if there is no room for it */
    long long model, micro_steps, syncs;
    volatile long long *step_at; /* and behind it the forwards since then */
    long long optimizer, until_syncs, until, step, ask_at;
    long long asked_step, asked_ns, ask_every, data_key;
    PyObject *optimizers;
    Words step_words, drawn_words;
} Counts;

static PyMemberDef counts_members[] = {
    {"is_on", T_BOOL, offsetof(Counts, is_on), 0, NULL},
    {"is_hook_counted", T_BOOL, offsetof(Counts, is_hook_counted), 0, NULL},
    {"step", T_LONGLONG, offsetof(Counts, step), 0, NULL},
    {"micro_steps", T_LONGLONG, offsetof(Counts, micro_steps), 0, NULL},
    {"syncs", T_LONGLONG, offsetof(Counts, syncs), 0, NULL},
    {"drawn", T_LONGLONG, offsetof(Counts, drawn), 0, NULL},
    {"until", T_LONGLONG, offsetof(Counts, until), 0, NULL},
    {"until_syncs", T_LONGLONG, offsetof(Counts, until_syncs), 0, NULL},
    {"ask_at", T_LONGLONG, offsetof(Counts, ask_at), 0, NULL},
    {"asked_step", T_LONGLONG, offsetof(Counts, asked_step), 0, NULL},
    {"asked_ns", T_LONGLONG, offsetof(Counts, asked_ns), 0, NULL},
    {"ask_every", T_LONGLONG, offsetof(Counts, ask_every), 0, NULL},
    {"model", T_LONGLONG, offsetof(Counts, model), 0, NULL},
    {"iterator", T_LONGLONG, offsetof(Counts, iterator), 0, NULL},
    {"optimizer", T_LONGLONG, offsetof(Counts, optimizer), 0, NULL},
    {"data_key", T_LONGLONG, offsetof(Counts, data_key), 0, NULL},
    {"optimizers", T_OBJECT_EX, offsetof(Counts, optimizers), 0, NULL},
    {NULL, 0, 0, 0, NULL},
};

/* A property: words of the page. */
static volatile long long *set_words(Words *words, PyObject *view, Py_ssize_t num) {
    Words before = *words;
    words->view = Py_XNewRef(view);
    words->memory.obj = NULL;
    if (view != NULL && PyObject_GetBuffer(view, &words->memory, PyBUF_WRITABLE) < 0) {
        PyErr_Clear(); /* of a page that is not there yet */
        words->memory.obj = NULL;
    } else if (words->memory.obj != NULL && words->memory.len < num * (Py_ssize_t)sizeof(long long)) {
        PyBuffer_Release(&words->memory);
    }
    if (before.memory.obj != NULL) {
        PyBuffer_Release(&before.memory);
    }
    Py_XDECREF(before.view);
    return words->memory.obj == NULL ? NULL : words->memory.buf;
}

static int counts_set_step(PyObject *self, PyObject *view, void *unused) {
    Counts *light = (Counts *)self;
    light->step_at = NULL;
    light->step_at = set_words(&light->step_words, view, 2);
    return 0;
}

static int counts_set_drawn(PyObject *self, PyObject *view, void *unused) {
    Counts *light = (Counts *)self;
    light->drawn_at = NULL;
    light->drawn_at = set_words(&light->drawn_words, view, 1);
    return 0;
}

static PyObject *view_of(Words *words) { return Py_NewRef(words->view == NULL ? Py_None : words->view); }

static PyObject *counts_get_step(PyObject *self, void *unused) { return view_of(&((Counts *)self)->step_words); }

static PyObject *counts_get_drawn(PyObject *self, void *unused) { return view_of(&((Counts *)self)->drawn_words); }

static PyGetSetDef counts_properties[] = {
    {"step_words", counts_get_step, counts_set_step, NULL, NULL},
    {"drawn_word", counts_get_drawn, counts_set_drawn, NULL, NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static int counts_traverse(PyObject *self, visitproc visit, void *arg) {
    /* Not the words: memory cannot hold a Counts, and before 3.13 a memoryview that a collection clears while it is exported crashes. */
    Py_VISIT(((Counts *)self)->optimizers);
    return 0;
}

static int counts_clear(PyObject *self) {
    Py_CLEAR(((Counts *)self)->optimizers);
    counts_set_drawn(self, NULL, NULL);
    return counts_set_step(self, NULL, NULL);
}

static void counts_dealloc(PyObject *self) {
    PyObject_GC_UnTrack(self);
    counts_clear(self);
    Py_TYPE(self)->tp_free(self);
}

static PyTypeObject CountsType = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "allranks.record._quick.Counts",
    .tp_basicsize = sizeof(Counts),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC,
    .tp_new = PyType_GenericNew,
    .tp_dealloc = counts_dealloc,
    .tp_traverse = counts_traverse,
    .tp_clear = counts_clear,
    .tp_members = counts_members,
    .tp_getset = counts_properties,
};

static long long monotonic_ns(void) { /* as time.monotonic_ns */
    struct timespec now;
#ifdef __APPLE__
    clock_gettime(CLOCK_UPTIME_RAW, &now);
#else
    clock_gettime(CLOCK_MONOTONIC, &now);
#endif
    return now.tv_sec * 1000000000LL + now.tv_nsec;
}

static inline long long id_of(PyObject *object) { return (long long)(uintptr_t)object; }

/* ---- marks ------------------------------------------------------------------------------------------------------------------------ */

enum { FORWARD, BACKWARD, NEXT_BATCH, NUM_KINDS }; /* as in counts.py */

#define LINE 64 /* bytes, of a cache */

typedef struct { /* what each call needs comes first, and in one line */
    Counts *light;
    PyObject *original, *is_grad_enabled;
    int kind;
    vectorcallfunc plain;
    PyObject *failed, *resume, *unsynchronised;
} __attribute__((aligned(LINE))) Mark;

#define MOST_MARKS 64

static struct { /* close together: each page that is touched costs, too */
    PyObject *averages; /* the name of DDP's attribute */
    int num_marks;
    PyObject *functions[MOST_MARKS]; /* Python functions; for as long as the process lives, as torch's own do */
    Mark marks[MOST_MARKS];
} all __attribute__((aligned(4096)));

/* -1 with an error set; takes the answer over. */
static inline int is_yes(PyObject *answer) {
    if (answer == Py_True || answer == Py_False) {
        Py_DECREF(answer);
        return answer == Py_True;
    }
    int is_true = answer == NULL ? -1 : PyObject_IsTrue(answer);
    Py_XDECREF(answer);
    return is_true;
}

/* Whether the marks of this call are light; -1 with an error set. */
static int is_light(Mark *mark, PyObject *const *args, Py_ssize_t num) {
    Counts *light = mark->light;
    if (!light->is_on || num < 1) {
        return 0;
    }
    if (mark->kind == BACKWARD) {
        return 1;
    }
    if (mark->kind == NEXT_BATCH) {
        return id_of(args[0]) == light->iterator;
    }
    if (id_of(args[0]) != light->model) {
        return 0;
    }
    return is_yes(PyObject_CallNoArgs(mark->is_grad_enabled));
}

/* What came of a call of ours while the user's error waits: false if it was interrupted (Ctrl-C, a handler that exits), which is set. */
static int was_said(PyObject *said) {
    if (said == NULL && !PyErr_ExceptionMatches(PyExc_Exception)) {
        return 0;
    }
    PyErr_Clear();
    Py_XDECREF(said);
    return 1;
}

/* The original has raised: say so. Its error is the one that goes on, whatever goes wrong here. */
__attribute__((cold, noinline)) static void tell(Mark *mark, PyObject *first) {
#if PY_VERSION_HEX >= 0x030c0000
    PyObject *error = PyErr_GetRaisedException();
#else
    PyObject *kind, *error, *traceback;
    PyErr_Fetch(&kind, &error, &traceback);
    PyErr_NormalizeException(&kind, &error, &traceback);
    if (traceback != NULL) {
        PyException_SetTraceback(error, traceback);
    }
#endif
    int is_over = was_said(PyObject_CallFunctionObjArgs(mark->failed, error, first, NULL)) &&
                  (mark->light->is_on || was_said(PyObject_CallNoArgs(mark->resume)));
#if PY_VERSION_HEX >= 0x030c0000
    if (is_over) {
        PyErr_SetRaisedException(error);
        return;
    }
#else
    if (is_over) {
        PyErr_Restore(kind, error, traceback);
        return;
    }
    Py_XDECREF(kind);
    Py_XDECREF(traceback);
#endif
    Py_XDECREF(error);
}

/* A forward or a batch that came is counted; -1 with an error set. */
static int count(Mark *mark, PyObject *first) {
    Counts *light = mark->light;
    if (mark->kind == NEXT_BATCH) {
        light->drawn++;
        if (light->drawn_at != NULL) {
            *light->drawn_at = light->drawn;
        }
    } else if (mark->kind == FORWARD) {
        light->micro_steps++;
        if (light->step_at != NULL) {
            light->step_at[1] = light->micro_steps;
        }
        int is_averaged = is_yes(PyObject_GetAttr(first, all.averages));
        if (is_averaged < 0) {
            return -1;
        }
        if (is_averaged) {
            light->syncs++;
            return 0;
        }
        PyObject *answer = PyObject_CallNoArgs(mark->unsynchronised);
        Py_XDECREF(answer);
        return answer == NULL ? -1 : 0;
    }
    return 0;
}

#define HOT __attribute__((hot))

HOT static PyObject *call_mark(PyObject *function, PyObject *const *args, size_t flags, PyObject *names) {
    int number = 0;
    while (all.functions[number] != function) { /* it is there: only `quicken` puts this into a function */
        number++;
    }
    Mark *mark = &all.marks[number];
    int light = is_light(mark, args, PyVectorcall_NARGS(flags));
    if (light <= 0) {
        return light < 0 ? NULL : mark->plain(function, args, flags, names);
    }
    PyObject *first = Py_NewRef(args[0]);
    PyObject *original = mark->original;
    PyObject *result = PyFunction_Check(original) ? ((PyFunctionObject *)original)->vectorcall(original, args, flags, names)
                                                  : PyObject_Vectorcall(original, args, flags, names);
    if (result == NULL) {
        tell(mark, first);
    } else {
        if (!mark->light->is_on) { /* the tick thread has ended light marks during the call */
            PyObject *resumed = PyObject_CallNoArgs(mark->resume);
            if (resumed == NULL) {
                Py_CLEAR(result);
            }
            Py_XDECREF(resumed);
        }
        if (result != NULL && count(mark, first) < 0) {
            Py_CLEAR(result);
        }
    }
    Py_DECREF(first);
    return result;
}

/* CPython 3.11 runs a Python function that Python code calls without asking its vectorcall. What torch calls so has this in front of it: it is the
   function in all that can be asked of it, but for its type. */

#define HAS_FRONTS (PY_VERSION_HEX >= 0x030b0000 && PY_VERSION_HEX < 0x030c0000)

typedef struct {
    PyObject_HEAD
    vectorcallfunc vectorcall;
    PyObject *function;
    PyObject *weak_references;
} Front;

static PyObject *function_of(PyObject *self) { return ((Front *)self)->function; }

HOT static PyObject *front_call(PyObject *self, PyObject *const *args, size_t flags, PyObject *names) {
    return call_mark(function_of(self), args, flags, names);
}

static PyObject *front_get_attribute(PyObject *self, PyObject *name) {
    PyObject *found = PyObject_GenericGetAttr(self, name);
    if (found == NULL && PyErr_ExceptionMatches(PyExc_AttributeError)) {
        PyErr_Clear();
        found = PyObject_GetAttr(function_of(self), name);
    }
    return found;
}

static int front_set_attribute(PyObject *self, PyObject *name, PyObject *value) {
    return PyObject_GenericSetAttr(function_of(self), name, value);
}

static PyObject *front_bind(PyObject *self, PyObject *instance, PyObject *owner) {
    return instance == NULL || instance == Py_None ? Py_NewRef(self) : PyMethod_New(self, instance);
}

static PyObject *front_show(PyObject *self) { return PyObject_Repr(function_of(self)); }

static PyObject *front_doc(PyObject *self, void *unused) { return PyObject_GetAttrString(function_of(self), "__doc__"); }

static PyObject *front_reduce(PyObject *self, PyObject *unused) {
    return PyObject_GetAttrString(function_of(self), "__qualname__"); /* by its name, as a function */
}

static void front_dealloc(PyObject *self) {
    if (((Front *)self)->weak_references != NULL) {
        PyObject_ClearWeakRefs(self);
    }
    Py_DECREF(function_of(self));
    Py_TYPE(self)->tp_free(self);
}

static PyMethodDef front_methods[] = {
    {"__reduce__", front_reduce, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef front_properties[] = {
    {"__doc__", front_doc, NULL, NULL, NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyTypeObject FrontType = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "allranks.record._quick.Front",
    .tp_basicsize = sizeof(Front),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_VECTORCALL,
    .tp_dealloc = front_dealloc,
    .tp_call = PyVectorcall_Call,
    .tp_vectorcall_offset = offsetof(Front, vectorcall),
    .tp_weaklistoffset = offsetof(Front, weak_references),
    .tp_getattro = front_get_attribute,
    .tp_setattro = front_set_attribute,
    .tp_descr_get = front_bind,
    .tp_repr = front_show,
    .tp_methods = front_methods,
    .tp_getset = front_properties,
};

static PyObject *front_of(PyObject *function) {
    Front *front = PyObject_New(Front, &FrontType);
    if (front != NULL) {
        front->vectorcall = front_call;
        front->function = Py_NewRef(function);
        front->weak_references = NULL;
    }
    return (PyObject *)front;
}

/* What is to stand where the mark stood. */
static PyObject *quicken(PyObject *module, PyObject *args) {
    Mark mark = {0};
    PyObject *marked;
    if (!PyArg_ParseTuple(args, "O!iO!OOOOO", &PyFunction_Type, &marked, &mark.kind, &CountsType, &mark.light, &mark.original,
                          &mark.failed, &mark.resume, &mark.is_grad_enabled, &mark.unsynchronised)) {
        return NULL;
    }
    PyFunctionObject *function = (PyFunctionObject *)marked;
    if (mark.kind < 0 || mark.kind >= NUM_KINDS) {
        return PyErr_Format(PyExc_ValueError, "there is no kind %d of marks", mark.kind);
    }
    if (all.num_marks == MOST_MARKS || function->vectorcall == call_mark) {
        return Py_NewRef(marked);
    }
    mark.plain = function->vectorcall;
    PyObject *kept[] = {marked,      (PyObject *)mark.light, mark.original,      mark.failed,
                        mark.resume, mark.is_grad_enabled,   mark.unsynchronised};
    for (size_t i = 0; i < sizeof(kept) / sizeof(*kept); i++) {
        Py_INCREF(kept[i]);
    }
    all.functions[all.num_marks] = marked;
    all.marks[all.num_marks++] = mark;
#if PY_VERSION_HEX >= 0x030c0000
    PyFunction_SetVectorcall(function, call_mark);
#else
    function->vectorcall = call_mark;
#endif
    return HAS_FRONTS && mark.kind == BACKWARD ? front_of(marked) : Py_NewRef(marked);
}

/* ---- hooks of optimizers -------------------------------------------------------------------------------------------------------- */

enum { LIGHT, ENTER, LEAVE, NUM_HOOK_PARTS };

/* Whether marks are light and this optimizer's steps are counted; -1 with an error set. */
static int is_known(Counts *light, PyObject *optimizer) {
    if (!light->is_on) {
        return 0;
    }
    if (id_of(optimizer) == light->optimizer) {
        return 1;
    }
    if (light->optimizers == NULL || !PyDict_Check(light->optimizers)) {
        return 0;
    }
    PyObject *key = PyLong_FromVoidPtr(optimizer);
    if (key == NULL) {
        return -1;
    }
    PyObject *found = PyDict_GetItemWithError(light->optimizers, key);
    Py_DECREF(key);
    return found != NULL ? found == Py_True : PyErr_Occurred() ? -1 : 0;
}

HOT static PyObject *hook_enter(PyObject *self, PyObject *const *args, Py_ssize_t num) {
    int known = num < 1 ? 0 : is_known((Counts *)PyTuple_GET_ITEM(self, LIGHT), args[0]);
    if (known == 0) {
        return PyObject_Vectorcall(PyTuple_GET_ITEM(self, ENTER), args, num, NULL);
    }
    return known < 0 ? NULL : Py_NewRef(Py_None);
}

/* Whether `step` and those before it, since this was asked last, were quick. */
static int was_quick(Counts *light, long long step) {
    long long now = monotonic_ns();
    if (now - light->asked_ns >= (step - light->asked_step) * QUICK_STEP_NS) {
        return 0;
    }
    light->asked_ns = now, light->asked_step = step, light->ask_at = step + light->ask_every;
    return 1;
}

HOT static PyObject *hook_leave(PyObject *self, PyObject *const *args, Py_ssize_t num) {
    Counts *light = (Counts *)PyTuple_GET_ITEM(self, LIGHT);
    int known = num < 1 ? 0 : is_known(light, args[0]);
    if (known < 0) {
        return NULL;
    }
    int is_due = light->is_hook_counted && light->step + 1 >= light->until;
    if (known && !is_due && light->is_hook_counted && light->step + 1 >= light->ask_at && !was_quick(light, light->step + 1)) {
        light->ask_at = 0;
        light->until = light->step + 1;
        is_due = 1;
    }
    if (known == 0 || is_due || light->syncs >= light->until_syncs || light->step_at == NULL) {
        return PyObject_Vectorcall(PyTuple_GET_ITEM(self, LEAVE), args, num, NULL);
    }
    if (light->is_hook_counted) { /* else the library says so in a moment */
        light->step++;
        light->step_at[0] = light->step;
        light->step_at[1] = light->micro_steps = 0;
    }
    Py_RETURN_NONE;
}

static PyMethodDef enter_hook = {"allranks_enter", (PyCFunction)(void (*)(void))hook_enter, METH_FASTCALL, NULL};
static PyMethodDef leave_hook = {"allranks_leave", (PyCFunction)(void (*)(void))hook_leave, METH_FASTCALL, NULL};

static PyObject *hooks(PyObject *module, PyObject *args) {
    PyObject *light, *enter, *leave;
    if (!PyArg_ParseTuple(args, "O!OO", &CountsType, &light, &enter, &leave)) {
        return NULL;
    }
    PyObject *parts = PyTuple_Pack(NUM_HOOK_PARTS, light, enter, leave);
    PyObject *name = PyObject_GetAttrString(module, "__name__");
    PyObject *found = NULL;
    if (parts != NULL && name != NULL) {
        found = Py_BuildValue("NN", PyCFunction_NewEx(&enter_hook, parts, name), PyCFunction_NewEx(&leave_hook, parts, name));
    }
    Py_XDECREF(parts);
    Py_XDECREF(name);
    return found;
}

/* ---- the pace of the record's thread -------------------------------------------------------------------------------------------- */

/* As pace.py has it in Python. To take the GIL for each tick would cost ten times what the tick does. */

enum { TICKS, TICK_NS, ASK, ANSWERED, SINCE_NS, SAMPLE_UNTIL_NS, NUM_TICK_WORDS };

typedef struct {
    PyObject_HEAD
    PyThread_type_lock lock; /* held until the thread is to end */
    int is_over;
    long long every_us, light_every, stale_ns;
    int word[NUM_TICK_WORDS]; /* where in the page */
    long long ticks, step, ns, ended;
} Pace;

static PyMemberDef pace_members[] = {
    {"ticks", T_LONGLONG, offsetof(Pace, ticks), READONLY, NULL},
    {"step", T_LONGLONG, offsetof(Pace, step), 0, NULL},
    {"ns", T_LONGLONG, offsetof(Pace, ns), 0, NULL},
    {"ended", T_LONGLONG, offsetof(Pace, ended), 0, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyObject *pace_new(PyTypeObject *type, PyObject *args, PyObject *names) {
    static char *keywords[] = {"every_us", "light_every", "stale_ns", "words", NULL};
    Pace given = {.step = -1, .ended = 1LL << 62};
    int *word = given.word;
    if (!PyArg_ParseTupleAndKeywords(args, names, "LLL(iiiiii)", keywords, &given.every_us, &given.light_every, &given.stale_ns, &word[TICKS],
                                     &word[TICK_NS], &word[ASK], &word[ANSWERED], &word[SINCE_NS], &word[SAMPLE_UNTIL_NS])) {
        return NULL;
    }
    given.lock = PyThread_allocate_lock();
    if (given.lock == NULL) {
        return PyErr_NoMemory();
    }
    PyThread_acquire_lock(given.lock, NOWAIT_LOCK);
    Pace *pace = (Pace *)type->tp_alloc(type, 0);
    if (pace == NULL) {
        PyThread_free_lock(given.lock);
        return NULL;
    }
    given.ob_base = pace->ob_base;
    *pace = given;
    return (PyObject *)pace;
}

static void pace_dealloc(PyObject *self) {
    PyThread_free_lock(((Pace *)self)->lock);
    Py_TYPE(self)->tp_free(self);
}

/* One tick; whether nothing is to be done but to say that it came. Without the GIL. */
static int is_light_tick(Pace *pace, volatile Counts *light, volatile long long *words) {
    long long step = light->step, now = monotonic_ns(), ended = step - pace->step, oldest = now - pace->stale_ns;
    pace->ticks++;
    if (!light->is_on || 2 * ended <= pace->ended || (words[pace->word[SINCE_NS]] <= oldest && light->asked_ns <= oldest) ||
        pace->ticks % pace->light_every == 0 || words[pace->word[SAMPLE_UNTIL_NS]] != 0 ||
        words[pace->word[ASK]] > words[pace->word[ANSWERED]]) {
        return 0;
    }
    pace->step = step, pace->ns = now, pace->ended = ended;
    words[pace->word[TICK_NS]] = now, words[pace->word[TICKS]] = pace->ticks;
    return 1;
}

static PyObject *pace_wait(PyObject *self, PyObject *args) {
    Pace *pace = (Pace *)self;
    Counts *light;
    PyObject *view;
    Py_buffer memory;
    if (!PyArg_ParseTuple(args, "O!O!", &CountsType, &light, &PyMemoryView_Type, &view) ||
        PyObject_GetBuffer(view, &memory, PyBUF_WRITABLE) < 0) {
        return NULL;
    }
    volatile long long *words = memory.buf;
    for (int i = 0; i < NUM_TICK_WORDS; i++) {
        if (pace->word[i] < 0 || (pace->word[i] + 1) * (Py_ssize_t)sizeof(long long) > memory.len) {
            PyBuffer_Release(&memory);
            PyErr_SetString(PyExc_ValueError, "the page has no such words");
            return NULL;
        }
    }
    /* The memory is there for as long as the object lives that has it. It is not held as a buffer meanwhile: a child that is forked now, which has no
       thread that would give it back, could never close its parent's page. */
    PyObject *page = Py_XNewRef(PyMemoryView_GET_BASE(view));
    PyBuffer_Release(&memory);
    Py_INCREF(light);
    Py_BEGIN_ALLOW_THREADS;
    do {
        pace->is_over = pace->is_over || PyThread_acquire_lock_timed(pace->lock, pace->every_us, 0) == PY_LOCK_ACQUIRED;
    } while (!pace->is_over && is_light_tick(pace, light, words));
    Py_END_ALLOW_THREADS;
    Py_DECREF(light);
    Py_XDECREF(page);
    return PyBool_FromLong(!pace->is_over);
}

static PyObject *pace_stop(PyObject *self, PyObject *unused) {
    PyThread_type_lock lock = ((Pace *)self)->lock;
    PyThread_acquire_lock(lock, NOWAIT_LOCK); /* so that it may be called again */
    PyThread_release_lock(lock);
    Py_RETURN_NONE;
}

static PyMethodDef pace_methods[] = {
    {"wait", pace_wait, METH_VARARGS, NULL},
    {"stop", pace_stop, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static PyTypeObject PaceType = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "allranks.record._quick.Pace",
    .tp_basicsize = sizeof(Pace),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_new = pace_new,
    .tp_dealloc = pace_dealloc,
    .tp_methods = pace_methods,
    .tp_members = pace_members,
};

/* ---- the module ------------------------------------------------------------------------------------------------------------------- */

static PyMethodDef functions[] = {
    {"quicken", quicken, METH_VARARGS, NULL},
    {"hooks", hooks, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_quick", NULL, -1, functions, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__quick(void) {
    if (PyType_Ready(&CountsType) < 0 || PyType_Ready(&FrontType) < 0 || PyType_Ready(&PaceType) < 0) {
        return NULL;
    }
    if (all.averages == NULL && (all.averages = PyUnicode_InternFromString("require_backward_grad_sync")) == NULL) {
        return NULL;
    }
    PyObject *module = PyModule_Create(&definition);
    if (module != NULL && (PyModule_AddObjectRef(module, "Counts", (PyObject *)&CountsType) < 0 ||
                           PyModule_AddObjectRef(module, "Pace", (PyObject *)&PaceType) < 0 ||
                           PyModule_AddIntConstant(module, "VERSION", VERSION) < 0)) {
        Py_CLEAR(module);
    }
    return module;
}
