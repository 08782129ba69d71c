/* Load for the bench: HTTP/1.1 over kept connections, one thread, one epoll.
 *
 *     load closed PORT get|post CONNECTIONS SECONDS WARM   the next request as soon as one is answered
 *     load rate PORT get|post RATE SECONDS WARM            open loop: requests go out on a fixed schedule
 *     load streams PORT COUNT SECONDS                      event streams, counted for so long
 *     load hold PORT COUNT                                 event streams that stay silent, until stdin ends
 *     load bytes PORT MIB                                  one download
 *
 * "begin" is printed when all is open and warm (WARM answers were read), then, after the measured
 * part, "end" and a JSON object: what was counted between the two. Times in it are microseconds.
 * In the open loop a request's latency runs from when it was due, whether or not a connection was
 * free or this process late: a slow answer does not hide the wait of those behind it.
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

#define SECOND 1000000000LL
#define RATE_CONNECTIONS 256
#define LARGEST 16384 /* bytes of an answer that is read whole */
#define PATIENCE (120 * SECOND)

struct conn {
  int fd;
  int64_t due;    /* when the request that it works on was sent or had to be; 0: idle */
  size_t size;    /* bytes of the answer so far */
  int64_t last;   /* when the last event came; 0: none yet */
  int digits;     /* of an event's stamp, seen so far; -1: none begun */
  uint64_t stamp;
  struct conn *idle;
  char answer[LARGEST + 1];
};

struct samples {
  size_t count, room;
  uint32_t *us10; /* tenths of microseconds */
};

static int epoll, timer, port;
static struct conn *conns, *idle;
static char request[16384];
static size_t request_size;
static int64_t answered, failed, events;
static int measuring;
static struct samples latencies, first_bytes, gaps, delays;

static int64_t now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * SECOND + t.tv_nsec;
}

static void fail(const char *what) {
  fprintf(stderr, "load: %s: %s\n", what, errno ? strerror(errno) : "failed");
  exit(1);
}

static void add(struct samples *s, int64_t ns) {
  if (s->count == s->room) {
    s->room = s->room ? 2 * s->room : 65536;
    if (!(s->us10 = realloc(s->us10, s->room * sizeof *s->us10))) fail("realloc");
  }
  s->us10[s->count++] = ns < 0 ? 0 : ns / 100 > UINT32_MAX ? UINT32_MAX : (uint32_t)(ns / 100);
}

static int compare(const void *a, const void *b) {
  uint32_t x = *(const uint32_t *)a, y = *(const uint32_t *)b;
  return (x > y) - (x < y);
}

static double quantile(struct samples *s, double q) {
  size_t i = (size_t)(q * (double)s->count);
  return s->us10[i < s->count ? i : s->count - 1] / 10.0;
}

static void print_samples(const char *name, struct samples *s) {
  if (!s->count) return;
  qsort(s->us10, s->count, sizeof *s->us10, compare);
  printf(", \"%s\": {\"p50\": %.1f, \"p99\": %.1f, \"p999\": %.1f, \"max\": %.1f}", name,
         quantile(s, 0.5), quantile(s, 0.99), quantile(s, 0.999), quantile(s, 1));
}

static void say_begin(void) {
  puts("begin");
  fflush(stdout);
}

/* The headers that OpenAI's Python client sends. */
static const char HEADERS[] = "Host: 127.0.0.1:8080\r\nAccept: application/json\r\n"
                              "Accept-Encoding: gzip, deflate\r\n"
                              "User-Agent: OpenAI/Python 1.99.0\r\n"
                              "Authorization: Bearer sk-0123456789abcdef0123456789abcdef\r\n";

static void prepare_get(const char *target) {
  request_size = (size_t)sprintf(request, "GET %s HTTP/1.1\r\n%s\r\n", target, HEADERS);
}

static void prepare_post(const char *model, int stream, size_t size) {
  static char text[8193];
  char body[9000];
  memset(text, 'x', size);
  int length = sprintf(body,
                       "{\"model\":\"%s\",\"stream\":%s,\"messages\":[{\"role\":\"user\","
                       "\"content\":\"%s\"}]}",
                       model, stream ? "true" : "false", text);
  request_size = (size_t)sprintf(request,
                                 "POST /v1/chat/completions HTTP/1.1\r\n%s"
                                 "Content-Type: application/json\r\nContent-Length: %d\r\n\r\n%s",
                                 HEADERS, length, body);
}

static void prepare(const char *kind) {
  if (!strcmp(kind, "get")) prepare_get("/v1/models");
  else prepare_post("answer", 0, 8192 - 75);
}

static void open_conn(struct conn *c, int number) {
  struct sockaddr_in to = {.sin_family = AF_INET, .sin_port = htons((uint16_t)port),
                           .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
  /* Ten thousand connections from one address would leave no ports to the next run. */
  struct sockaddr_in from = {.sin_family = AF_INET,
                             .sin_addr.s_addr = htonl(INADDR_LOOPBACK + 1 + number % 16)};
  int yes = 1;
  c->fd = socket(AF_INET, SOCK_STREAM, 0);
  if (c->fd < 0) fail("socket");
  setsockopt(c->fd, IPPROTO_IP, IP_BIND_ADDRESS_NO_PORT, &yes, sizeof yes);
  if (bind(c->fd, (struct sockaddr *)&from, sizeof from)) fail("bind");
  if (connect(c->fd, (struct sockaddr *)&to, sizeof to)) fail("connect");
  setsockopt(c->fd, IPPROTO_TCP, TCP_NODELAY, &yes, sizeof yes);
  fcntl(c->fd, F_SETFL, O_NONBLOCK);
  c->size = 0;
  c->last = 0;
  c->digits = -1;
  struct epoll_event wanted = {EPOLLIN, {.ptr = c}};
  if (epoll_ctl(epoll, EPOLL_CTL_ADD, c->fd, &wanted)) fail("epoll_ctl");
}

static void allocate(int count) {
  conns = calloc((size_t)count, sizeof *conns);
  if (!conns) fail("calloc");
}

static void ask(struct conn *c, int64_t due) {
  c->due = due;
  c->size = 0;
  if (send(c->fd, request, request_size, MSG_NOSIGNAL) != (ssize_t)request_size) fail("send");
}

/* Whether the answer is there to its end. Its status must be 200. */
static int complete(struct conn *c) {
  c->answer[c->size] = 0;
  char *head_end = strstr(c->answer, "\r\n\r\n");
  if (!head_end) return 0;
  if (strncmp(c->answer + 8, " 200", 4)) failed++;
  char *length = strcasestr(c->answer, "\ncontent-length:");
  if (length && length < head_end)
    return c->size >= (size_t)(head_end - c->answer) + 4 + (size_t)atoll(length + 16);
  return c->size >= 7 && !strcmp(c->answer + c->size - 7, "\r\n0\r\n\r\n");
}

/* Read what is there; whether the answer is complete now. A closed connection is opened anew. */
static int read_answer(struct conn *c) {
  ssize_t got = recv(c->fd, c->answer + c->size, LARGEST - c->size, 0);
  if (got < 0 && errno == EAGAIN) return 0;
  if (got <= 0) {
    if (c->due) failed++;
    close(c->fd);
    open_conn(c, (int)(c - conns));
    return c->due != 0;
  }
  c->size += (size_t)got;
  return complete(c);
}

static void set_timer(int64_t at) {
  struct itimerspec when = {.it_value = {.tv_sec = at / SECOND, .tv_nsec = at % SECOND}};
  timerfd_settime(timer, TFD_TIMER_ABSTIME, &when, NULL);
}

static void closed_loop(int count, double seconds, int64_t warm) {
  allocate(count);
  for (int i = 0; i < count; i++) open_conn(conns + i, i);
  for (int i = 0; i < count; i++) ask(conns + i, now());
  int64_t began = 0, stop = 0;
  for (int64_t at = now(); !stop || at < stop; at = now()) {
    struct epoll_event ready[256];
    int found = epoll_wait(epoll, ready, 256, 100);
    for (int i = 0; i < found; i++) {
      struct conn *c = ready[i].data.ptr;
      if (!read_answer(c)) continue;
      answered++;
      ask(c, 1);
    }
    if (!stop && answered >= warm) {
      say_begin();
      answered = failed = 0;
      began = now();
      stop = began + (int64_t)(seconds * SECOND);
    }
  }
  printf("end {\"seconds\": %.6f, \"answered\": %lld, \"failed\": %lld}\n",
         (double)(now() - began) / SECOND, (long long)answered, (long long)failed);
}

static void read_rated(int timeout) {
  struct epoll_event ready[256];
  int found = epoll_wait(epoll, ready, 256, timeout);
  for (int i = 0; i < found; i++) {
    struct conn *c = ready[i].data.ptr;
    uint64_t expired;
    if (!c) {
      if (read(timer, &expired, sizeof expired) < 0) continue;
    } else if (read_answer(c)) {
      answered++;
      if (measuring) add(&latencies, now() - c->due);
      c->due = 0;
      c->idle = idle;
      idle = c;
    }
  }
}

/* Send `total` requests, one each `period`; read all answers, or give up on those that are left. */
static void send_on_schedule(int64_t total, int64_t period) {
  int64_t start = now() + period, sent = 0, give_up = start + total * period + 3 * SECOND;
  answered = failed = 0;
  while (answered < total && now() < give_up) {
    for (; sent < total && idle && start + sent * period <= now(); sent++) {
      struct conn *c = idle;
      idle = c->idle;
      ask(c, start + sent * period);
    }
    if (sent < total && idle) set_timer(start + sent * period);
    read_rated(100);
  }
  for (int64_t i = answered; measuring && i < total; i++) add(&latencies, PATIENCE);
}

static void fixed_rate(double rate, double seconds, int64_t warm) {
  allocate(RATE_CONNECTIONS);
  for (int i = RATE_CONNECTIONS - 1; i >= 0; i--) {
    open_conn(conns + i, i);
    conns[i].idle = idle;
    idle = conns + i;
  }
  struct epoll_event wanted = {EPOLLIN, {.ptr = NULL}};
  epoll_ctl(epoll, EPOLL_CTL_ADD, timer, &wanted);
  int64_t period = (int64_t)(SECOND / rate), total = (int64_t)(rate * seconds);
  send_on_schedule(warm, period);
  measuring = 1;
  say_begin();
  send_on_schedule(total, period);
  printf("end {\"answered\": %lld, \"failed\": %lld, \"unanswered\": %lld", (long long)answered,
         (long long)failed, (long long)(total - answered));
  print_samples("latency", &latencies);
  puts("}");
}

static void take_event(struct conn *c, int64_t at) {
  if (measuring) {
    events++;
    if (c->last) add(&gaps, at - c->last);
  }
  c->last = at;
  c->digits = 0;
  c->stamp = 0;
}

/* An event is counted at its @. A stamp that a chunk's frame cuts in two gives no delay. */
static void scan(struct conn *c, const char *data, size_t size, int64_t at) {
  for (size_t i = 0; i < size; i++) {
    if (c->digits < 0) {
      const char *found = memchr(data + i, '@', size - i);
      if (!found) return;
      i = (size_t)(found - data);
      take_event(c, at);
      continue;
    }
    char d = data[i];
    int value = d >= '0' && d <= '9' ? d - '0' : d >= 'a' && d <= 'f' ? d - 'a' + 10 : -1;
    c->stamp = c->stamp << 4 | (uint64_t)value;
    if (value < 0) c->digits = -1;
    else if (++c->digits == 16) {
      if (measuring) add(&delays, at - (int64_t)c->stamp);
      c->digits = -1;
    }
  }
}

/* Read the streams until `until`, or until `wanted` of them have begun; how many have. */
static int read_streams(int64_t until, int wanted) {
  static char data[65536];
  static int begun;
  for (int64_t at = now(); at < until && begun < wanted; at = now()) {
    struct epoll_event ready[256];
    int found = epoll_wait(epoll, ready, 256, (int)((until - at) / 1000000) + 1);
    for (int i = 0; i < found; i++) {
      struct conn *c = ready[i].data.ptr;
      ssize_t got = recv(c->fd, data, sizeof data, 0);
      if (got < 0 && errno == EAGAIN) continue;
      if (got <= 0 || (!c->last && !c->size && memcmp(data, "HTTP/1.1 200", 12))) {
        failed++;
        epoll_ctl(epoll, EPOLL_CTL_DEL, c->fd, NULL);
        continue;
      }
      int64_t read_at = now();
      if (!c->size) add(&first_bytes, read_at - c->due);
      c->size += (size_t)got;
      int64_t before = c->last;
      scan(c, data, (size_t)got, read_at);
      begun += !before && c->last;
    }
  }
  return begun;
}

/* One after the other at a pace that spreads their events over the period of 40 ms. */
static void open_streams(int count, int64_t pace) {
  allocate(count);
  for (int i = 0; i < count; i++) {
    open_conn(conns + i, i);
    ask(conns + i, now());
    read_streams(now() + pace, count + 1);
  }
  int64_t give_up = now() + PATIENCE;
  errno = 0;
  if (read_streams(give_up, count) < count) {
    fprintf(stderr, "load: %lld of %d streams did not begin\n", (long long)failed, count);
    exit(1);
  }
}

static void streams(int count, double seconds) {
  prepare_post("stream", 1, 200);
  open_streams(count, 2000000 + 40000000 / count);
  measuring = 1;
  say_begin();
  int64_t began = now();
  read_streams(began + (int64_t)(seconds * SECOND), count + 1);
  printf("end {\"seconds\": %.6f, \"events\": %lld, \"failed\": %lld",
         (double)(now() - began) / SECOND, (long long)events, (long long)failed);
  print_samples("first_byte", &first_bytes);
  print_samples("gap", &gaps);
  print_samples("delay", &delays);
  puts("}");
}

static void hold(int count) {
  prepare_post("hold", 1, 200);
  open_streams(count, 0);
  say_begin();
  while (getchar() != EOF) continue;
  printf("end {\"failed\": %lld}\n", (long long)failed);
}

/* The kernel throws the bytes away: reading them costs this process next to nothing. */
static void download(long mib) {
  char target[64];
  sprintf(target, "/bytes/%ld", mib);
  prepare_get(target);
  allocate(1);
  open_conn(conns, 0);
  fcntl(conns->fd, F_SETFL, 0);
  say_begin();
  int64_t began = now(), wanted = mib * (1LL << 20), got = 0;
  ask(conns, began);
  while (got < wanted) {
    ssize_t part = recv(conns->fd, NULL, 1 << 20, MSG_TRUNC);
    if (part <= 0) fail("download");
    got += part;
  }
  printf("end {\"seconds\": %.6f, \"mib\": %ld}\n", (double)(now() - began) / SECOND, mib);
}

int main(int count, char **words) {
  const char *mode = count > 3 ? words[1] : "";
  signal(SIGPIPE, SIG_IGN);
  port = count > 2 ? atoi(words[2]) : 0;
  epoll = epoll_create1(0);
  timer = timerfd_create(CLOCK_MONOTONIC, TFD_NONBLOCK);
  if (!strcmp(mode, "closed") && count == 7) {
    prepare(words[3]);
    closed_loop(atoi(words[4]), atof(words[5]), atoll(words[6]));
  } else if (!strcmp(mode, "rate") && count == 7) {
    prepare(words[3]);
    fixed_rate(atof(words[4]), atof(words[5]), atoll(words[6]));
  } else if (!strcmp(mode, "streams") && count == 5) {
    streams(atoi(words[3]), atof(words[4]));
  } else if (!strcmp(mode, "hold")) {
    hold(atoi(words[3]));
  } else if (!strcmp(mode, "bytes")) {
    download(atol(words[3]));
  } else {
    fprintf(stderr, "load: see the head of load.c\n");
    return 2;
  }
  return 0;
}
