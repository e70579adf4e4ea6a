/* What `prepare` does for every document, where Python's own pace would cost as much as the encoder.
 *
 * Optional: every function has a twin in Python that gives the same results (`penstock/native.py` says which), and
 * tests/test_native.py compares them. Nothing here decides anything: rules stay in Python, and whatever isn't plain
 * (a file that changed, a literal that was met) is left to them. Limited API: one build serves every Python from 3.11.
 */
#define Py_LIMITED_API 0x030B0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>
#define HAS_AVX2_CODE 1
#else
#define HAS_AVX2_CODE 0
#endif

#if HAS_AVX2_CODE && defined(__GLIBC__) && !defined(__clang__)
#define FOR_EACH_PROCESSOR __attribute__((target_clones("avx2", "default")))
#else
#define FOR_EACH_PROCESSOR
#endif

/* Below this the GIL isn't worth giving up: 30 microseconds at most. */
#define SMALL_BYTES (1 << 17)

#define BLOCK 64

/* ---- folders -------------------------------------------------------------------------------------------------- */

/* list_folder(descriptor, with_facts) -> [(name, kind, facts)]
 *
 * Kinds: "f" a file, "d" a folder, "l" a link, "s" anything else. Facts of a file: size, modified and changed in
 * nanoseconds, inode, each 8 bytes, little-endian; None where it vanished or nobody asked. */
static PyObject *list_folder(PyObject *self, PyObject *const *arguments, Py_ssize_t count) {
    if (count != 2) {
        PyErr_SetString(PyExc_TypeError, "list_folder takes a descriptor and whether facts are wanted");
        return NULL;
    }
    long folder = PyLong_AsLong(arguments[0]);
    int with_facts = PyObject_IsTrue(arguments[1]);
    if (with_facts < 0 || PyErr_Occurred()) return NULL;
    int own = fcntl((int)folder, F_DUPFD_CLOEXEC, 0);
    DIR *listing = own < 0 ? NULL : fdopendir(own);
    if (listing == NULL) {
        PyErr_SetFromErrno(PyExc_OSError);
        if (own >= 0) close(own);
        return NULL;
    }
    PyObject *entries = PyList_New(0);
    while (entries != NULL) {
        errno = 0;
        struct dirent *entry = readdir(listing);
        if (entry == NULL) {
            if (errno != 0) {
                PyErr_SetFromErrno(PyExc_OSError);
                Py_CLEAR(entries);
            }
            break;
        }
        const char *name = entry->d_name;
        if (name[0] == '.' && (name[1] == 0 || (name[1] == '.' && name[2] == 0))) continue;
        struct stat facts;
        int known = 0;
        unsigned char type = entry->d_type;
        if (type == DT_UNKNOWN || (with_facts && type == DT_REG)) {
            known = fstatat((int)folder, name, &facts, AT_SYMLINK_NOFOLLOW) == 0;
            /* An unknown kind that vanished is a special file to whoever asks: `os.DirEntry` says the same. */
            if (type == DT_UNKNOWN)
                type = !known                    ? DT_FIFO
                       : S_ISREG(facts.st_mode) ? DT_REG
                       : S_ISDIR(facts.st_mode) ? DT_DIR
                       : S_ISLNK(facts.st_mode) ? DT_LNK
                                                : DT_FIFO;
        }
        const char *kind = type == DT_REG ? "f" : type == DT_DIR ? "d" : type == DT_LNK ? "l" : "s";
        PyObject *made;
        if (type == DT_REG && known) {
            int64_t packed[4] = {
                facts.st_size,
                facts.st_mtim.tv_sec * INT64_C(1000000000) + facts.st_mtim.tv_nsec,
                facts.st_ctim.tv_sec * INT64_C(1000000000) + facts.st_ctim.tv_nsec,
                (int64_t)facts.st_ino,
            };
            made = Py_BuildValue("(ysy#)", name, kind, (const char *)packed, (Py_ssize_t)sizeof packed);
        } else {
            made = Py_BuildValue("(ysO)", name, kind, Py_None);
        }
        if (made == NULL || PyList_Append(entries, made) < 0) Py_CLEAR(entries);
        Py_XDECREF(made);
    }
    rewinddir(listing); /* for whoever lists it through the same descriptor next */
    closedir(listing);
    return entries;
}

/* ---- text ----------------------------------------------------------------------------------------------------- */

FOR_EACH_PROCESSOR
static size_t ascii_blocks(const uint8_t *data, size_t size) {
    size_t done = 0;
    for (; done + BLOCK <= size; done += BLOCK) {
        uint8_t seen = 0;
        for (int number = 0; number < BLOCK; number++) seen |= data[done + number];
        if (seen & 0x80) break;
    }
    return done;
}

/* Whether the bytes are UTF-8 as Python's strict decoder takes it: shortest forms, no surrogates, up to U+10FFFF. */
static int is_utf8(const uint8_t *data, size_t size) {
    size_t at = 0;
    while (at < size) {
        at += ascii_blocks(data + at, size - at);
        size_t until = at + BLOCK < size ? at + BLOCK : size;
        while (at < until) {
            uint8_t first = data[at];
            size_t more;
            uint8_t low = 0x80, high = 0xBF;
            if (first < 0x80) {
                at++;
                continue;
            }
            if (first < 0xC2 || first > 0xF4) return 0;
            if (first < 0xE0) {
                more = 1;
            } else if (first < 0xF0) {
                more = 2;
                if (first == 0xE0) low = 0xA0;
                if (first == 0xED) high = 0x9F;
            } else {
                more = 3;
                if (first == 0xF0) low = 0x90;
                if (first == 0xF4) high = 0x8F;
            }
            if (size - at <= more || data[at + 1] < low || data[at + 1] > high) return 0;
            for (size_t number = 2; number <= more; number++)
                if ((data[at + number] & 0xC0) != 0x80) return 0;
            at += more + 1;
        }
    }
    return 1;
}

/* text_problem(data) -> 0: text, 1: empty, 2: binary, 3: not UTF-8 */
static int problem_of(const uint8_t *data, size_t size) {
    return size == 0 ? 1 : memchr(data, 0, size) ? 2 : is_utf8(data, size) ? 0 : 3;
}

static PyObject *text_problem(PyObject *self, PyObject *data) {
    char *bytes = PyBytes_AsString(data);
    if (bytes == NULL) return NULL;
    size_t size = (size_t)PyBytes_Size(data);
    int problem;
    if (size < SMALL_BYTES) {
        problem = problem_of((const uint8_t *)bytes, size);
    } else {
        Py_BEGIN_ALLOW_THREADS
        problem = problem_of((const uint8_t *)bytes, size);
        Py_END_ALLOW_THREADS
    }
    return PyLong_FromLong(problem);
}

/* ---- files that were walked ----------------------------------------------------------------------------------- */

/* openat2(2), which glibc has no function for; the layout of its argument is the kernel's promise. */
#ifndef SYS_openat2
#define SYS_openat2 437
#endif
struct how_to_open {
    uint64_t flags, mode, resolve;
};
#define NO_LINKS_BENEATH (0x04 | 0x08) /* RESOLVE_NO_SYMLINKS, RESOLVE_BENEATH */

/* read_text(root, path, size) -> bytes | 2 | 3 | None
 *
 * The file's bytes, or what `text_problem` says of them, if it opens and is exactly as long as the walk saw it; None for
 * everything else, which the caller looks into at leisure. No link is followed, at any level below the root, and no FIFO waited for; a kernel before 5.6
 * can't promise that in one call, and gives None. */
static PyObject *read_text(PyObject *self, PyObject *const *arguments, Py_ssize_t count) {
    if (count != 3) {
        PyErr_SetString(PyExc_TypeError, "read_text takes a folder's descriptor, a path and a size");
        return NULL;
    }
    long folder = PyLong_AsLong(arguments[0]);
    char *name = PyBytes_AsString(arguments[1]);
    Py_ssize_t size = PyLong_AsSsize_t(arguments[2]);
    if (name == NULL || PyErr_Occurred()) return NULL;
    if (size <= 0 || (Py_ssize_t)strlen(name) != PyBytes_Size(arguments[1])) Py_RETURN_NONE;
    PyObject *data = PyBytes_FromStringAndSize(NULL, size);
    if (data == NULL) return NULL;
    char *bytes = PyBytes_AsString(data);
    ssize_t got = -1;
    int problem = 0;
    Py_BEGIN_ALLOW_THREADS
    struct how_to_open how = {O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC, 0, NO_LINKS_BENEATH};
    int file = (int)syscall(SYS_openat2, (int)folder, name, &how, sizeof how);
    if (file >= 0) {
        /* One byte more than there should be: into the place of the NUL that ends every bytes object. */
        got = read(file, bytes, (size_t)size + 1);
        close(file);
        if (got == size) problem = problem_of((const uint8_t *)bytes, (size_t)size);
    }
    Py_END_ALLOW_THREADS
    bytes[size] = 0;
    if (got == size && problem == 0) return data;
    Py_DECREF(data);
    if (got == size) return PyLong_FromLong(problem);
    Py_RETURN_NONE;
}

/* ---- literals ------------------------------------------------------------------------------------------------- */

/* A search for many literals at once, after Teddy of Hyperscan: of each literal a window of four bytes is looked for,
 * 32 places at a time, by tables of half bytes. 16 buckets, each a bit of two tables; a place that may begin a window
 * of some bucket is then asked for by a hash of its four bytes, and for the whole literal. */
#define WINDOW 4
#define BUCKETS 16
#define HASH_BITS 12
#define MOST_LITERALS 255
#define LONGEST_LITERAL 32

typedef struct {
    uint32_t window;
    uint8_t length, offset; /* of the literal; of the window in it */
    uint8_t next;           /* with the same hash, plus 1 */
    uint16_t must_hold;     /* 0, or: counts only if `needed` is within so many bytes after the literal */
    uint8_t needed;
    uint8_t literal[LONGEST_LITERAL];
} Literal;

typedef struct {
    /* [half of the buckets][place in the window][low, high half of the byte][value] */
    uint8_t tables[2][WINDOW][2][16];
    uint8_t first[1 << HASH_BITS]; /* number of the first literal with this hash, plus 1 */
    int count, at_a_time;
    Literal literals[MOST_LITERALS];
} Literals;

static const char *const LITERALS = "penstock._native.literals";

static uint32_t hash_of(uint32_t window) { return (window * 2654435761u) >> (32 - HASH_BITS); }

static uint32_t window_at(const uint8_t *place) {
    uint32_t window;
    memcpy(&window, place, sizeof window);
    return window;
}

static void free_literals(PyObject *capsule) { free(PyCapsule_GetPointer(capsule, LITERALS)); }

static int has_avx2(void) {
#if HAS_AVX2_CODE
    return __builtin_cpu_supports("avx2");
#else
    return 0;
#endif
}

/* literals([(literal, offset of the window, bucket, must hold, needed)], most) -> search | None where there is no such
 *
 * Looks at 64, 32 or 1 places at a time: as many as the processor can, and at most so many; None if that is 1 and more
 * were wanted. */
static PyObject *literals(PyObject *self, PyObject *const *arguments, Py_ssize_t arguments_count) {
    if (arguments_count != 2) {
        PyErr_SetString(PyExc_TypeError, "literals takes rules and the most places to look at");
        return NULL;
    }
    PyObject *rules = arguments[0];
    long most = PyLong_AsLong(arguments[1]);
    if (PyErr_Occurred()) return NULL;
    if (most > 1 && !has_avx2()) Py_RETURN_NONE;
    Py_ssize_t count = PySequence_Size(rules);
    if (count < 0) return NULL;
    if (count > MOST_LITERALS) {
        PyErr_SetString(PyExc_ValueError, "too many literals");
        return NULL;
    }
    Literals *made = calloc(1, sizeof *made);
    if (made == NULL) return PyErr_NoMemory();
    made->at_a_time = most >= 32 ? 32 : 1;
#if HAS_AVX2_CODE
    if (most >= 64 && __builtin_cpu_supports("avx512bw")) made->at_a_time = 64;
#endif
    for (Py_ssize_t number = 0; number < count; number++) {
        PyObject *rule = PySequence_GetItem(rules, number);
        const char *bytes;
        Py_ssize_t length;
        int offset, bucket, must_hold, needed;
        int parsed = rule != NULL && PyArg_ParseTuple(rule, "y#iiii", &bytes, &length, &offset, &bucket, &must_hold,
                                                      &needed);
        int fits = parsed && length >= WINDOW && length <= LONGEST_LITERAL && offset >= 0 && offset + WINDOW <= length &&
                   bucket >= 0 && bucket < BUCKETS && must_hold >= 0 && must_hold < 65536 && needed >= 0 && needed < 256;
        if (fits) {
            Literal *literal = &made->literals[made->count++];
            const uint8_t *window = (const uint8_t *)bytes + offset;
            literal->window = window_at(window);
            literal->length = (uint8_t)length;
            literal->offset = (uint8_t)offset;
            literal->must_hold = (uint16_t)must_hold;
            literal->needed = (uint8_t)needed;
            memcpy(literal->literal, bytes, (size_t)length);
            uint32_t hash = hash_of(literal->window);
            literal->next = made->first[hash];
            made->first[hash] = (uint8_t)made->count;
            for (int place = 0; place < WINDOW; place++) {
                made->tables[bucket >> 3][place][0][window[place] & 15] |= (uint8_t)(1 << (bucket & 7));
                made->tables[bucket >> 3][place][1][window[place] >> 4] |= (uint8_t)(1 << (bucket & 7));
            }
        }
        Py_XDECREF(rule);
        if (!fits) {
            free(made);
            if (!PyErr_Occurred()) PyErr_SetString(PyExc_ValueError, "a literal of the wrong size, place or bucket");
            return NULL;
        }
    }
    return PyCapsule_New(made, LITERALS, free_literals);
}

/* What a search does where it meets literals: stop at the first that counts, or note down all of them. */
typedef struct {
    PyObject *hits; /* NULL: stop */
    int failed;
} Finding;

static int note(Finding *finding, int number, size_t start, size_t end) {
    PyObject *hit = Py_BuildValue("(nin)", (Py_ssize_t)start, number, (Py_ssize_t)end);
    finding->failed = hit == NULL || PyList_Append(finding->hits, hit) < 0;
    Py_XDECREF(hit);
    return finding->failed;
}

/* Whether the search is over at a place where one of the windows may begin. */
static int is_over(const Literals *all, const uint8_t *data, size_t size, size_t place, Finding *finding) {
    uint32_t window = window_at(data + place);
    for (int number = all->first[hash_of(window)]; number != 0; number = all->literals[number - 1].next) {
        const Literal *literal = &all->literals[number - 1];
        if (literal->window != window || place < literal->offset) continue;
        size_t start = place - literal->offset;
        if (size - start < literal->length || memcmp(data + start, literal->literal, literal->length) != 0) continue;
        size_t end = start + literal->length;
        if (literal->must_hold != 0) {
            size_t left = size - end < literal->must_hold ? size - end : literal->must_hold;
            if (memchr(data + end, literal->needed, left) == NULL) continue;
        }
        if (finding->hits == NULL || note(finding, number - 1, start, end)) return 1;
    }
    return 0;
}

static int find_slowly(const Literals *all, const uint8_t *data, size_t size, size_t at, Finding *finding) {
    for (; at + WINDOW <= size; at++)
        if (is_over(all, data, size, at, finding)) return 1;
    return 0;
}

#if HAS_AVX2_CODE
/* In both: the last window of a step begins at its last place, and its last byte is three further on. */
__attribute__((target("avx2"))) static int find_by_32(const Literals *all, const uint8_t *data, size_t size, Finding *finding) {
    const __m256i low_half = _mm256_set1_epi8(15);
    __m256i tables[2][WINDOW][2];
    for (int half = 0; half < 2; half++)
        for (int place = 0; place < WINDOW; place++)
            for (int part = 0; part < 2; part++)
                tables[half][place][part] =
                    _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)all->tables[half][place][part]));
    size_t at = 0;
    for (; at + 32 + WINDOW - 1 <= size; at += 32) {
        __m256i first = _mm256_set1_epi8(-1), second = first;
        for (int place = 0; place < WINDOW; place++) {
            __m256i bytes = _mm256_loadu_si256((const __m256i *)(data + at + place));
            __m256i low = _mm256_and_si256(bytes, low_half);
            __m256i high = _mm256_and_si256(_mm256_srli_epi16(bytes, 4), low_half);
            first = _mm256_and_si256(first, _mm256_and_si256(_mm256_shuffle_epi8(tables[0][place][0], low),
                                                             _mm256_shuffle_epi8(tables[0][place][1], high)));
            second = _mm256_and_si256(second, _mm256_and_si256(_mm256_shuffle_epi8(tables[1][place][0], low),
                                                               _mm256_shuffle_epi8(tables[1][place][1], high)));
        }
        __m256i none = _mm256_cmpeq_epi8(_mm256_or_si256(first, second), _mm256_setzero_si256());
        uint32_t places = ~(uint32_t)_mm256_movemask_epi8(none);
        for (; places != 0; places &= places - 1)
            if (is_over(all, data, size, at + (size_t)__builtin_ctz(places), finding)) return 1;
    }
    return find_slowly(all, data, size, at, finding);
}

__attribute__((target("avx512bw"))) static int find_by_64(const Literals *all, const uint8_t *data, size_t size, Finding *finding) {
    const __m512i low_half = _mm512_set1_epi8(15);
    __m512i tables[2][WINDOW][2];
    for (int half = 0; half < 2; half++)
        for (int place = 0; place < WINDOW; place++)
            for (int part = 0; part < 2; part++)
                tables[half][place][part] =
                    _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)all->tables[half][place][part]));
    size_t at = 0;
    for (; at + 64 + WINDOW - 1 <= size; at += 64) {
        __m512i first = _mm512_set1_epi8(-1), second = first;
        for (int place = 0; place < WINDOW; place++) {
            __m512i bytes = _mm512_loadu_si512(data + at + place);
            __m512i low = _mm512_and_si512(bytes, low_half);
            __m512i high = _mm512_and_si512(_mm512_srli_epi16(bytes, 4), low_half);
            /* 0x80: all three */
            first = _mm512_ternarylogic_epi32(first, _mm512_shuffle_epi8(tables[0][place][0], low),
                                              _mm512_shuffle_epi8(tables[0][place][1], high), 0x80);
            second = _mm512_ternarylogic_epi32(second, _mm512_shuffle_epi8(tables[1][place][0], low),
                                               _mm512_shuffle_epi8(tables[1][place][1], high), 0x80);
        }
        __m512i either = _mm512_or_si512(first, second);
        for (uint64_t places = _mm512_test_epi8_mask(either, either); places != 0; places &= places - 1)
            if (is_over(all, data, size, at + (size_t)__builtin_ctzll(places), finding)) return 1;
    }
    return find_slowly(all, data, size, at, finding);
}
#endif

static int find(const Literals *all, const uint8_t *data, size_t size, Finding *finding) {
#if HAS_AVX2_CODE
    if (all->at_a_time == 64) return find_by_64(all, data, size, finding);
    if (all->at_a_time == 32) return find_by_32(all, data, size, finding);
#endif
    return find_slowly(all, data, size, 0, finding);
}

/* hits(search, data) -> [(start, number, end)] of every literal that is met and counts, in no order */
static PyObject *hits(PyObject *self, PyObject *const *arguments, Py_ssize_t count) {
    if (count != 2) {
        PyErr_SetString(PyExc_TypeError, "hits takes a search and data");
        return NULL;
    }
    const Literals *all = PyCapsule_GetPointer(arguments[0], LITERALS);
    const char *bytes = all == NULL ? NULL : PyBytes_AsString(arguments[1]);
    if (bytes == NULL) return NULL;
    Finding finding = {PyList_New(0), 0};
    if (finding.hits == NULL) return NULL;
    find(all, (const uint8_t *)bytes, (size_t)PyBytes_Size(arguments[1]), &finding);
    if (finding.failed) Py_CLEAR(finding.hits);
    return finding.hits;
}

/* look(secrets, head words, data) -> bits: 1, a literal of secrets is met; 2, a word of heads is met in the head; 4, in
 * one of the probes for lines there is no newline. The numbers are those of hygiene/content.py. */
#define HEAD_BYTES 2048
#define MIN_MINIFIED_BYTES 1024
#define PROBE_BYTES 256

static int marks_of(const Literals *secrets, const Literals *head, const uint8_t *data, size_t size) {
    Finding finding = {NULL, 0};
    int marks = find(secrets, data, size, &finding) ? 1 : 0;
    if (find(head, data, size < HEAD_BYTES ? size : HEAD_BYTES, &finding)) marks |= 2;
    if (size >= MIN_MINIFIED_BYTES && (memchr(data + (size >> 2), 10, PROBE_BYTES) == NULL ||
                                       memchr(data + (size >> 1), 10, PROBE_BYTES) == NULL ||
                                       memchr(data + size - PROBE_BYTES, 10, PROBE_BYTES) == NULL))
        marks |= 4;
    return marks;
}

static PyObject *look(PyObject *self, PyObject *const *arguments, Py_ssize_t count) {
    if (count != 3) {
        PyErr_SetString(PyExc_TypeError, "look takes two searches and data");
        return NULL;
    }
    const Literals *secrets = PyCapsule_GetPointer(arguments[0], LITERALS);
    const Literals *head = secrets == NULL ? NULL : PyCapsule_GetPointer(arguments[1], LITERALS);
    const char *bytes = head == NULL ? NULL : PyBytes_AsString(arguments[2]);
    if (bytes == NULL) return NULL;
    size_t size = (size_t)PyBytes_Size(arguments[2]);
    int marks;
    if (size < SMALL_BYTES) {
        marks = marks_of(secrets, head, (const uint8_t *)bytes, size);
    } else {
        Py_BEGIN_ALLOW_THREADS
        marks = marks_of(secrets, head, (const uint8_t *)bytes, size);
        Py_END_ALLOW_THREADS
    }
    return PyLong_FromLong(marks);
}

/* line_facts(data, long) -> (newlines, bytes in lines longer than that) */
static PyObject *line_facts(PyObject *self, PyObject *const *arguments, Py_ssize_t count) {
    if (count != 2) {
        PyErr_SetString(PyExc_TypeError, "line_facts takes data and a length");
        return NULL;
    }
    const char *at = PyBytes_AsString(arguments[0]);
    Py_ssize_t longest = at == NULL ? 0 : PyLong_AsSsize_t(arguments[1]);
    if (at == NULL || PyErr_Occurred()) return NULL;
    const char *end = at + PyBytes_Size(arguments[0]);
    Py_ssize_t newlines = 0, in_long_lines = 0;
    Py_BEGIN_ALLOW_THREADS
    for (;;) {
        const char *newline = at < end ? memchr(at, 10, (size_t)(end - at)) : NULL;
        Py_ssize_t length = (newline == NULL ? end : newline) - at;
        if (length > longest) in_long_lines += length;
        if (newline == NULL) break;
        newlines++;
        at = newline + 1;
    }
    Py_END_ALLOW_THREADS
    return Py_BuildValue("(nn)", newlines, in_long_lines);
}

/* ---- tokens --------------------------------------------------------------------------------------------------- */

FOR_EACH_PROCESSOR
static uint32_t narrowed(const uint32_t *ids, size_t count, uint16_t *target) {
    uint32_t largest = 0;
    for (size_t number = 0; number < count; number++) {
        largest = ids[number] > largest ? ids[number] : largest;
        target[number] = (uint16_t)ids[number];
    }
    return largest;
}

FOR_EACH_PROCESSOR
static uint32_t copied(const uint32_t *ids, size_t count, uint32_t *target) {
    uint32_t largest = 0;
    for (size_t number = 0; number < count; number++) {
        largest = ids[number] > largest ? ids[number] : largest;
        target[number] = ids[number];
    }
    return largest;
}

/* place(ids, borders, target, begin, end) -> the largest id
 *
 * Writes texts one after the other into the target, which they fill, each between begin and end tokens, in the target's
 * width: that of `end`, one token. Ids are 4 bytes, the n + 1 borders between the texts 8. */
static PyObject *place(PyObject *self, PyObject *const *arguments, Py_ssize_t count) {
    if (count != 5) {
        PyErr_SetString(PyExc_TypeError, "place takes ids, borders, a target, begin and end tokens");
        return NULL;
    }
    const char *begin = PyBytes_AsString(arguments[3]);
    const char *end = begin == NULL ? NULL : PyBytes_AsString(arguments[4]);
    if (end == NULL) return NULL;
    Py_buffer ids, borders, target;
    if (PyObject_GetBuffer(arguments[0], &ids, PyBUF_SIMPLE) < 0) return NULL;
    if (PyObject_GetBuffer(arguments[1], &borders, PyBUF_SIMPLE) < 0) {
        PyBuffer_Release(&ids);
        return NULL;
    }
    if (PyObject_GetBuffer(arguments[2], &target, PyBUF_WRITABLE) < 0) {
        PyBuffer_Release(&ids);
        PyBuffer_Release(&borders);
        return NULL;
    }
    Py_ssize_t width = PyBytes_Size(arguments[4]), begins = PyBytes_Size(arguments[3]);
    Py_ssize_t texts = borders.len / 8 - 1;
    const int64_t *border = borders.buf;
    uint32_t largest = 0;
    int fits = (width == 2 || width == 4) && begins % width == 0 && ids.len % 4 == 0 && borders.len % 8 == 0 &&
               texts >= 0 && border[0] == 0 && border[texts] == ids.len / 4 &&
               target.len == (ids.len / 4 + texts) * width + texts * begins;
    for (Py_ssize_t number = 0; fits && number < texts; number++) fits = border[number] <= border[number + 1];
    if (fits) {
        Py_BEGIN_ALLOW_THREADS
        char *to = target.buf;
        for (Py_ssize_t number = 0; number < texts; number++) {
            const uint32_t *from = (const uint32_t *)ids.buf + border[number];
            size_t length = (size_t)(border[number + 1] - border[number]);
            memcpy(to, begin, (size_t)begins);
            to += begins;
            uint32_t own = width == 2 ? narrowed(from, length, (uint16_t *)to) : copied(from, length, (uint32_t *)to);
            largest = own > largest ? own : largest;
            to += (Py_ssize_t)length * width;
            memcpy(to, end, (size_t)width);
            to += width;
        }
        Py_END_ALLOW_THREADS
    } else {
        PyErr_SetString(PyExc_ValueError, "the texts don't fit the target");
    }
    PyBuffer_Release(&ids);
    PyBuffer_Release(&borders);
    PyBuffer_Release(&target);
    return fits ? PyLong_FromUnsignedLong(largest) : NULL;
}

static PyMethodDef functions[] = {
    {"read_text", (PyCFunction)(void (*)(void))read_text, METH_FASTCALL, NULL},
    {"list_folder", (PyCFunction)(void (*)(void))list_folder, METH_FASTCALL, NULL},
    {"text_problem", text_problem, METH_O, NULL},
    {"literals", (PyCFunction)(void (*)(void))literals, METH_FASTCALL, NULL},
    {"hits", (PyCFunction)(void (*)(void))hits, METH_FASTCALL, NULL},
    {"look", (PyCFunction)(void (*)(void))look, METH_FASTCALL, NULL},
    {"line_facts", (PyCFunction)(void (*)(void))line_facts, METH_FASTCALL, NULL},
    {"place", (PyCFunction)(void (*)(void))place, METH_FASTCALL, NULL},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "penstock._native", NULL, 0, functions, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__native(void) {
#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
    PyErr_SetString(PyExc_ImportError, "only for little-endian machines");
    return NULL;
#endif
    return PyModuleDef_Init(&module);
}
