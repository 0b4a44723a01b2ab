/* A network between hosts: relay MILLISECONDS MBITS LOSS NAMESPACE...

Makes the device eth0 in each network namespace, prints a line, and passes frames between them until standard input ends. Each
device sends and receives at so many Mbit/s (0: any), every frame takes the delay, and a share of them is lost. A device drops
what would wait for longer than 200 ms. */

#define _GNU_SOURCE
#include <fcntl.h>
#include <linux/if.h>
#include <linux/if_tun.h>
#include <poll.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <time.h>
#include <unistd.h>

enum { HOSTS = 16, FRAME = 2048, QUEUED = 1 << 17, BURST = 64 };
static const double BUFFER = 0.2;

struct frame { double due; int to, size; unsigned char data[FRAME]; };

static struct frame *queue[QUEUED]; /* a binary heap: the next one comes first */
static int queued;

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + t.tv_nsec / 1e9;
}

static void push(struct frame *frame) {
    int at = queued++;
    for (; at && queue[(at - 1) / 2]->due > frame->due; at = (at - 1) / 2) queue[at] = queue[(at - 1) / 2];
    queue[at] = frame;
}

static struct frame *pop(void) {
    struct frame *first = queue[0], *last = queue[--queued];
    int at = 0, next;
    while ((next = 2 * at + 1) < queued) {
        if (next + 1 < queued && queue[next + 1]->due < queue[next]->due) next++;
        if (queue[next]->due >= last->due) break;
        queue[at] = queue[next];
        at = next;
    }
    queue[at] = last;
    return first;
}

static int device(const char *name) {
    char path[256];
    struct ifreq request = {.ifr_name = "eth0", .ifr_flags = IFF_TAP | IFF_NO_PI};
    snprintf(path, sizeof path, "/run/netns/%s", name);
    int space = open(path, O_RDONLY);
    if (space < 0 || setns(space, CLONE_NEWNET)) { perror(path); exit(1); }
    int opened = open("/dev/net/tun", O_RDWR | O_NONBLOCK);
    if (opened < 0 || ioctl(opened, TUNSETIFF, &request)) { perror("/dev/net/tun"); exit(1); }
    close(space);
    return opened;
}

int main(int count, char **words) {
    double delay = atof(words[1]) / 1e3, second = atof(words[2]) * 1e6 / 8, loss = atof(words[3]);
    double sent[HOSTS] = {0}, received[HOSTS] = {0};
    unsigned char addresses[HOSTS][6] = {{0}};
    struct pollfd polled[HOSTS + 1] = {{.fd = 0, .events = POLLIN}};
    int hosts = count - 4;
    for (int host = 0; host < hosts; host++)
        polled[host + 1] = (struct pollfd){.fd = device(words[host + 4]), .events = POLLIN};
    puts("ready");
    fflush(stdout);
    for (;;) {
        double wait = queued ? queue[0]->due - now() : 1;
        struct timespec limit = {0, wait > 0 ? (wait < 0.9 ? wait : 0.9) * 1e9 : 0};
        ppoll(polled, hosts + 1, &limit, NULL);
        if (polled[0].revents) return 0;
        for (int from = 0; from < hosts; from++) {
            for (int burst = 0; polled[from + 1].revents && burst < BURST; burst++) {
                unsigned char data[FRAME];
                int size = read(polled[from + 1].fd, data, FRAME);
                if (size < 14) break;
                memcpy(addresses[from], data + 6, 6);
                double time = now(), takes = second ? size / second : 0;
                if (sent[from] < time) sent[from] = time;
                if (sent[from] - time > BUFFER || drand48() < loss) continue;
                sent[from] += takes;
                for (int to = 0; to < hosts; to++) {
                    if (to == from || queued == QUEUED || !(data[0] & 1 || !memcmp(data, addresses[to], 6))) continue;
                    struct frame *frame = malloc(sizeof *frame);
                    frame->due = sent[from] + delay;
                    if (frame->due < received[to]) frame->due = received[to];
                    received[to] = frame->due + takes;
                    frame->to = to;
                    frame->size = size;
                    memcpy(frame->data, data, size);
                    push(frame);
                }
            }
        }
        while (queued && queue[0]->due <= now()) {
            struct frame *frame = pop();
            if (write(polled[frame->to + 1].fd, frame->data, frame->size) < 0) {} /* its device is down */
            free(frame);
        }
    }
}
