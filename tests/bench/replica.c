/* A replica that costs next to nothing: fixed answers over HTTP/1.1, one thread, one epoll.
 *
 *     replica PORTS     listens on so many free ports of 127.0.0.1, prints them on one line
 *
 * GET /bytes/N       N MiB
 * GET anything       a short JSON answer
 * POST, its body decides: "model":"stream"  one event each 40 ms, until the client closes
 *                         "model":"hold"    one event, then nothing, until the client closes
 *                         anything else     2 KB of JSON
 * Each event carries the time it was written at, for load.c on the same machine.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/tcp.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/timerfd.h>
#include <time.h>
#include <unistd.h>

#define PERIOD 40000000LL /* ns between two events: 25 a second */
#define LARGEST 65536     /* bytes of a request */
#define MIB (1 << 20)

enum kind { LISTENER, TIMER, CLIENT, ENDED };

struct conn {
  enum kind kind;
  int fd;
  size_t held;              /* bytes of a request that is not complete */
  char *request;            /* they are here */
  int64_t left;             /* bytes of a download still to send */
  int64_t due;              /* when the next event is; 0: no stream */
  struct conn *next, *prev; /* streams by due time: the period is one, so a new one is last */
};

static struct conn *first, *last;
static struct conn *ended; /* freed when no event of this round can name them any more */
static int epoll, timer;
static char bulk[MIB];
static char answer[512], body_2k[4096];
static size_t answer_size, body_2k_size;
static const char STREAM_HEAD[] =
    "HTTP/1.1 200 OK\r\ndate: Thu, 01 Jan 2026 00:00:00 GMT\r\nserver: uvicorn\r\n"
    "content-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n";
/* As vLLM writes them, and a stamp of 16 digits after the only @. */
static const char EVENT[] =
    "data: {\"id\":\"chatcmpl-5c1f0e7d2b8a4f3e\",\"object\":\"chat.completion.chunk\","
    "\"created\":1767225600,\"model\":\"stream\",\"choices\":[{\"index\":0,\"delta\":"
    "{\"content\":\" token\"},\"finish_reason\":null}],\"at\":\"@%016llx\"}\n\n";

static int64_t now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * 1000000000LL + t.tv_nsec;
}

static void fail(const char *what) {
  perror(what);
  exit(1);
}

static size_t with_head(char *into, const char *body) {
  return (size_t)sprintf(into,
                         "HTTP/1.1 200 OK\r\ndate: Thu, 01 Jan 2026 00:00:00 GMT\r\n"
                         "server: uvicorn\r\ncontent-length: %zu\r\n"
                         "content-type: application/json\r\n\r\n%s",
                         strlen(body), body);
}

static void prepare_answers(void) {
  char text[2049];
  answer_size = with_head(answer, "{\"object\":\"list\",\"data\":[{\"id\":\"answer\",\"object\":"
                                  "\"model\",\"created\":1767225600,\"owned_by\":\"vllm\"}]}");
  memset(text, 'x', 2048);
  memcpy(text, "{\"text\":\"", 9);
  strcpy(text + 2046, "\"}");
  body_2k_size = with_head(body_2k, text);
}

static void arm_timer(void) {
  struct itimerspec at = {0};
  if (first) {
    at.it_value.tv_sec = first->due / 1000000000LL;
    at.it_value.tv_nsec = first->due % 1000000000LL;
  }
  timerfd_settime(timer, TFD_TIMER_ABSTIME, &at, NULL);
}

static void leave_queue(struct conn *c) {
  if (!c->due) return;
  *(c->prev ? &c->prev->next : &first) = c->next;
  *(c->next ? &c->next->prev : &last) = c->prev;
  c->due = 0;
}

static void join_queue(struct conn *c, int64_t due) {
  c->due = due;
  c->next = NULL;
  c->prev = last;
  *(last ? &last->next : &first) = c;
  last = c;
}

static void end(struct conn *c) {
  int was_first = c == first;
  leave_queue(c);
  if (was_first) arm_timer();
  close(c->fd);
  free(c->request);
  c->kind = ENDED;
  c->next = ended;
  ended = c;
}

/* What does not fit into the socket's buffer means a client that is broken: it is cut off. */
static int send_whole(struct conn *c, const char *data, size_t size) {
  return send(c->fd, data, size, MSG_NOSIGNAL) == (ssize_t)size;
}

static size_t write_event(char *into) {
  char event[512];
  int size = sprintf(event, EVENT, (unsigned long long)now());
  return (size_t)sprintf(into, "%x\r\n%s\r\n", size, event);
}

static int begin_stream(struct conn *c, int goes_on) {
  char out[1024];
  memcpy(out, STREAM_HEAD, sizeof STREAM_HEAD - 1);
  size_t size = sizeof STREAM_HEAD - 1;
  size += write_event(out + size);
  if (goes_on) {
    join_queue(c, now() + PERIOD);
    if (first == c) arm_timer();
  }
  return send_whole(c, out, size);
}

static void send_due_events(void) {
  char out[1024];
  uint64_t expired;
  if (read(timer, &expired, sizeof expired) < 0) return;
  while (first && first->due <= now()) {
    struct conn *c = first;
    int64_t due = c->due + PERIOD;
    leave_queue(c);
    join_queue(c, due);
    if (!send_whole(c, out, write_event(out))) end(c);
  }
  arm_timer();
}

static int send_more(struct conn *c) {
  while (c->left) {
    size_t size = c->left < MIB ? (size_t)c->left : MIB;
    ssize_t sent = send(c->fd, bulk, size, MSG_NOSIGNAL);
    if (sent < 0) {
      if (errno != EAGAIN) return 0;
      struct epoll_event wanted = {EPOLLIN | EPOLLOUT, {.ptr = c}};
      epoll_ctl(epoll, EPOLL_CTL_MOD, c->fd, &wanted);
      return 1;
    }
    c->left -= sent;
  }
  struct epoll_event wanted = {EPOLLIN, {.ptr = c}};
  epoll_ctl(epoll, EPOLL_CTL_MOD, c->fd, &wanted);
  return 1;
}

static int begin_download(struct conn *c, int64_t mib) {
  char head[256];
  c->left = mib * MIB;
  int size = sprintf(head,
                     "HTTP/1.1 200 OK\r\nserver: uvicorn\r\ncontent-length: %lld\r\n"
                     "content-type: application/octet-stream\r\n\r\n",
                     (long long)c->left);
  return send_whole(c, head, (size_t)size) && send_more(c);
}

static int holds(const char *data, size_t size, const char *text) {
  return memmem(data, size, text, strlen(text)) != NULL;
}

static int respond(struct conn *c, const char *request, const char *body, size_t body_size) {
  if (!strncmp(request, "GET /bytes/", 11)) return begin_download(c, atoll(request + 11));
  if (!body_size) return send_whole(c, answer, answer_size);
  if (holds(body, body_size, "\"model\":\"stream\"")) return begin_stream(c, 1);
  if (holds(body, body_size, "\"model\":\"hold\"")) return begin_stream(c, 0);
  return send_whole(c, body_2k, body_2k_size);
}

/* The bytes taken of `data`: 0 if the request is not complete, -1 if the connection is of no use. */
static ssize_t take(struct conn *c, char *data, size_t size) {
  char *end_of_head = memmem(data, size, "\r\n\r\n", 4);
  if (!end_of_head) return 0;
  size_t head = (size_t)(end_of_head - data) + 4, body = 0;
  *end_of_head = 0;
  char *length = strcasestr(data, "\ncontent-length:");
  char *chunked = strcasestr(data, "\ntransfer-encoding:");
  *end_of_head = '\r';
  if (length) body = (size_t)atoll(length + 16);
  if (chunked) {
    char *ended = memmem(data + head, size - head, "\r\n0\r\n\r\n", 7);
    if (!ended) return 0;
    body = (size_t)(ended - data) + 7 - head;
  }
  if (size < head + body) return 0;
  return respond(c, data, data + head, body) ? (ssize_t)(head + body) : -1;
}

static void read_from(struct conn *c) {
  static char shared[LARGEST + 1];
  char *data = c->request ? c->request : shared;
  ssize_t got = recv(c->fd, data + c->held, LARGEST - c->held, 0);
  if (got <= 0) {
    if (got == 0 || errno != EAGAIN) end(c);
    return;
  }
  size_t size = c->held + (size_t)got;
  ssize_t taken;
  while (size && (taken = take(c, data, size)) != 0) {
    if (taken < 0) {
      end(c);
      return;
    }
    data += taken;
    size -= (size_t)taken;
  }
  char *kept = NULL;
  if (size) {
    if (!(kept = malloc(LARGEST + 1))) fail("malloc");
    memcpy(kept, data, size);
  }
  free(c->request);
  c->request = kept;
  c->held = size;
}

static struct conn *watch(enum kind kind, int fd) {
  struct conn *c = calloc(1, sizeof *c);
  if (!c) fail("calloc");
  c->kind = kind;
  c->fd = fd;
  struct epoll_event wanted = {EPOLLIN, {.ptr = c}};
  if (epoll_ctl(epoll, EPOLL_CTL_ADD, fd, &wanted)) fail("epoll_ctl");
  return c;
}

static void accept_from(struct conn *listener) {
  int yes = 1, fd;
  while ((fd = accept4(listener->fd, NULL, NULL, SOCK_NONBLOCK)) >= 0) {
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &yes, sizeof yes);
    watch(CLIENT, fd);
  }
}

static int listen_on_free_port(void) {
  struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
  socklen_t size = sizeof address;
  int fd = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0);
  if (fd < 0 || bind(fd, (struct sockaddr *)&address, size) || listen(fd, 4096) ||
      getsockname(fd, (struct sockaddr *)&address, &size))
    fail("listen");
  watch(LISTENER, fd);
  return ntohs(address.sin_port);
}

int main(int count, char **words) {
  int ports = count > 1 ? atoi(words[1]) : 1;
  prepare_answers();
  signal(SIGPIPE, SIG_IGN);
  epoll = epoll_create1(0);
  timer = timerfd_create(CLOCK_MONOTONIC, TFD_NONBLOCK);
  watch(TIMER, timer);
  for (int i = 0; i < ports; i++) printf("%d ", listen_on_free_port());
  printf("\n");
  fflush(stdout);
  for (;;) {
    struct epoll_event ready[256];
    int found = epoll_wait(epoll, ready, 256, -1);
    for (int i = 0; i < found; i++) {
      struct conn *c = ready[i].data.ptr;
      if (c->kind == ENDED) continue;
      if (c->kind == LISTENER) accept_from(c);
      else if (c->kind == TIMER) send_due_events();
      else if (ready[i].events & EPOLLOUT && c->left && !send_more(c)) end(c);
      else if (ready[i].events & ~EPOLLOUT) read_from(c);
    }
    while (ended) {
      struct conn *c = ended;
      ended = c->next;
      free(c);
    }
  }
}
