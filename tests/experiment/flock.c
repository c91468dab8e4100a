/* flock as on a file system without it: below a directory it fails with an error. */
#define _GNU_SOURCE
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/syscall.h>
#include <unistd.h>

int flock(int file, int operation) {
    char name[64], path[4096] = "";
    const char *under = getenv("NO_FLOCK_UNDER");
    snprintf(name, sizeof name, "/proc/self/fd/%d", file);
    if (under && readlink(name, path, sizeof path - 1) > 0 && !strncmp(path, under, strlen(under))) {
        FILE *noted = fopen(getenv("NO_FLOCK_NOTES"), "a");
        if (noted) {
            fprintf(noted, "%s\n", path);
            fclose(noted);
        }
        errno = atoi(getenv("NO_FLOCK_ERRNO"));
        return -1;
    }
    return syscall(SYS_flock, file, operation);
}
