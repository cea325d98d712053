/* Ends this process with an exit code of its own when a signal comes, whatever Python is doing: the handler is C, so it runs while
   the interpreter's lock is held, in MPI's start and in its end (see comm/watch/pulse.py). */

#include <signal.h>
#include <stdint.h>
#include <unistd.h>

static int status[65];               /* of each signal */

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
