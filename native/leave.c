/* Ends this process with an exit code of its own when a signal comes, whatever Python is doing: the handler is C, so it runs while
   the interpreter's lock is held, in MPI's start and in its end (see comm/watch/pulse.py). */

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdint.h>
#include <string.h>
#include <sys/time.h>
#include <unistd.h>

enum { TICKS = 8 };                  /* a job that is stopped as a whole takes one alarm, however long it was stopped */

static int status[65];               /* of each signal */
static char line[512], claim[4096];
static volatile sig_atomic_t ticks;
static struct sigaction before;      /* what SIGALRM did */

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
    sigaction(SIGALRM, &action, &before);
    setitimer(ITIMER_REAL, &(struct itimerval){tick, tick}, 0);
}

void leave_not(void)
{
    setitimer(ITIMER_REAL, &(struct itimerval){{0, 0}, {0, 0}}, 0);
    sigaction(SIGALRM, &before, 0);
}
