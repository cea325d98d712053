/* Ends this process with an exit code of its own when a signal comes, or exit() of C, whatever Python is doing: the handler is C, so it runs while
   the interpreter's lock is held, in MPI's start and in its end (see comm/watch/pulse.py). */

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <unistd.h>

enum { TICKS = 8 };                  /* a job that is stopped as a whole takes one alarm, however long it was stopped */

static int status[65];               /* of each signal */
static char line[512], claim[4096];
static volatile sig_atomic_t ticks, armed;
static struct sigaction before;      /* what SIGALRM did */

static volatile uint64_t *words;     /* the rank's record */
static int over, ended_with;
static pid_t own;
static char ended[512];

static void leave(int number)
{
    _exit(status[number]);
}

/* 0, or -1 where the signal cannot be caught. */
int64_t leave_on(int64_t number, int64_t with)
{
    struct sigaction action = {.sa_handler = leave};
    if (number < 1 || number > 64)
        return -1;
    status[number] = (int)with;
    return sigaction((int)number, &action, 0);
}

static void late(int number)
{
    int saved = errno;
    if (++ticks < TICKS) {
        errno = saved;
        return;
    }
    if (open(claim, O_CREAT | O_EXCL | O_WRONLY | O_CLOEXEC, 0600) >= 0 || errno != EEXIST)
        (void)!write(2, line, strlen(line));
    _exit(status[number]);
}

/* In so many milliseconds, unless `leave_not` comes before, the process ends and writes a line. One that finds the file `once` there
   writes nothing; the others make it. Of long texts the first part counts. */
void leave_in(int64_t milliseconds, int64_t with, const char *what, const char *once)
{
    int64_t part = milliseconds * 1000 / TICKS;
    struct timeval tick = {part / 1000000, part % 1000000};
    struct sigaction action = {.sa_handler = late, .sa_flags = SA_RESTART};
    strncpy(line, what, sizeof line - 1);
    strncpy(claim, once, sizeof claim - 1);
    status[SIGALRM] = (int)with;
    ticks = 0;
    armed = 1;
    sigaction(SIGALRM, &action, &before);
    setitimer(ITIMER_REAL, &(struct itimerval){tick, tick}, 0);
}

void leave_not(void)
{
    if (!armed)
        return;                      /* the timer is the program's */
    armed = 0;
    setitimer(ITIMER_REAL, &(struct itimerval){{0, 0}, {0, 0}}, 0);
    sigaction(SIGALRM, &before, 0);
}

/* Something has called exit() of C. Python's end comes here too, but the record has said before that the rank is over. */
static void at_exit(void)
{
    if (getpid() != own || words[over])
        return;
    if (open(claim, O_CREAT | O_EXCL | O_WRONLY | O_CLOEXEC, 0600) >= 0 || errno != EEXIST) {
        (void)!write(2, ended, strlen(ended));
        usleep(100000);              /* for the launcher to read it before it hears of the end */
    }
    words[over] = 1;
    _exit(ended_with);
}

/* A call of exit() writes the line `what` and ends the process with `with`, unless the word `word` of the record in `file` is set.
   One that finds the file `once` there writes nothing. 0, or -1 where it cannot be had. */
int64_t leave_at_exit(int64_t file, int64_t bytes, int64_t word, int64_t with, const char *what, const char *once)
{
    void *memory = mmap(0, (size_t)bytes, PROT_READ | PROT_WRITE, MAP_SHARED, (int)file, 0);
    if (memory == MAP_FAILED)
        return -1;
    int first = !words;
    words = memory, over = (int)word, ended_with = (int)with, own = getpid();
    strncpy(ended, what, sizeof ended - 1);
    strncpy(claim, once, sizeof claim - 1);
    return first ? atexit(at_exit) : 0;
}
