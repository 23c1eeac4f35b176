// Graphs: a capture runs each launch and records it; when it ends, device memory is as it was before. A launch of the
// graph runs the records again, on the same addresses, in the order of their capture.
#include <algorithm>
#include <cstring>
#include <memory>
#include <set>

#include "runtime.h"

struct Node {
  std::function<void(int stream)> run;
  bool queues;
  long kernel;  // number of a kernel of Python's, else -1
};
struct Graph {
  std::vector<Node> nodes;
};
struct Capture {
  unsigned long long id;
  int origin;
  std::set<int> streams;
  bool valid = true;
  std::shared_ptr<Graph> graph = std::make_shared<Graph>();
  std::vector<std::pair<char*, std::string>> overwritten;
};

static unsigned long long next_id = 1;
static auto& captures = *new std::map<unsigned long long, std::shared_ptr<Capture>>;
static auto& by_stream = *new std::map<int, std::shared_ptr<Capture>>;
static thread_local cudaStreamCaptureMode mode = cudaStreamCaptureModeGlobal;

typedef int (*Replay)(long kernel);
static Replay replay = nullptr;
API void emu_replay_with(Replay function) { replay = function; }

// ---- while a stream is captured
bool capturing(int stream) { return by_stream.count(stream); }

unsigned long long capture_id(int stream) {
  auto it = by_stream.find(stream);
  return it == by_stream.end() ? 0 : it->second->id;
}

void join_capture(int stream, unsigned long long id) {
  auto it = captures.find(id);
  if (it == captures.end()) return;
  by_stream[stream] = it->second;
  it->second->streams.insert(stream);
}

void record(int stream, std::function<void(int)> node, bool queues) {
  by_stream[stream]->graph->nodes.push_back({std::move(node), queues, -1});
}

void record_access(const void* pointer, size_t size, int stream, bool write, const char* operation) {
  auto& capture = *by_stream[stream];
  if (write && block_of(device_blocks(), pointer))
    capture.overwritten.emplace_back((char*)pointer, std::string((const char*)pointer, size));
  std::string name = operation;
  capture.graph->nodes.push_back(
      {[=](int on) { access(pointer, size, on, write, name.c_str()); }, false, -1});
}

cudaError_t refuse_in_capture(int stream) {
  auto it = by_stream.find(stream);
  if (it == by_stream.end()) return cudaSuccess;
  it->second->valid = false;
  return fail(cudaErrorStreamCaptureUnsupported);
}

cudaError_t refuse_in_any_capture() {
  if (captures.empty() || mode == cudaStreamCaptureModeRelaxed) return cudaSuccess;
  for (auto& [id, capture] : captures) capture->valid = false;
  return fail(cudaErrorStreamCaptureUnsupported);
}

// A kernel of Python's, which has run, joins the graph; 0: the stream is not captured.
API int emu_record(cudaStream_t handle, long kernel) {
  LOCKED;
  int stream = id_of(handle);
  if (!capturing(stream)) return 0;
  by_stream[stream]->graph->nodes.push_back({nullptr, false, kernel});
  return 1;
}

API int emu_capturing(cudaStream_t stream) {
  LOCKED;
  return capturing(id_of(stream));
}

API void emu_refuse_in_capture(cudaStream_t stream) {
  LOCKED;
  refuse_in_capture(id_of(stream));
}

// ---- begin and end
API cudaError_t cudaStreamBeginCapture(cudaStream_t handle, cudaStreamCaptureMode) {
  LOCKED;
  int stream = id_of(handle);
  if ((size_t)handle < 16) return fail(cudaErrorStreamCaptureUnsupported);
  auto capture = std::make_shared<Capture>();
  capture->id = next_id++;
  capture->origin = stream;
  captures[capture->id] = capture;
  join_capture(stream, capture->id);
  return cudaSuccess;
}

static cudaError_t outcome(const Capture& capture) {
  if (!capture.valid) return cudaErrorStreamCaptureInvalidated;
  for (int stream : capture.streams)
    if (clock_of(capture.origin)[stream] < clock_of(stream)[stream]) return cudaErrorStreamCaptureUnjoined;
  return cudaSuccess;
}

API cudaError_t cudaStreamEndCapture(cudaStream_t handle, cudaGraph_t* graph) {
  int stream = id_of(handle);
  await_stream(stream);
  LOCKED;
  auto it = by_stream.find(stream);
  if (it == by_stream.end()) return fail(cudaErrorInvalidValue);
  auto capture = it->second;
  auto error = outcome(*capture);
  for (int joined : capture->streams) {
    by_stream.erase(joined);
    join(clock_of(HOST), clock_of(joined));  // its accesses race with none later: they did not happen
  }
  captures.erase(capture->id);
  std::reverse(capture->overwritten.begin(), capture->overwritten.end());
  for (auto& [pointer, bytes] : capture->overwritten)
    if (block_of(device_blocks(), pointer)) memcpy(pointer, bytes.data(), bytes.size());
  *graph = error ? nullptr : (cudaGraph_t) new std::shared_ptr<Graph>(capture->graph);
  return error ? fail(error) : cudaSuccess;
}

API cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
  LOCKED;
  auto it = by_stream.find(id_of(stream));
  *status = it == by_stream.end() ? cudaStreamCaptureStatusNone
            : it->second->valid   ? cudaStreamCaptureStatusActive
                                  : cudaStreamCaptureStatusInvalidated;
  return cudaSuccess;
}

API cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, cudaStreamCaptureStatus* status, unsigned long long* id,
                                         cudaGraph_t* graph, const cudaGraphNode_t** nodes,
                                         const cudaGraphEdgeData** edges, size_t* count) {
  LOCKED;
  if (id) *id = capture_id(id_of(stream));
  if (graph) *graph = nullptr;
  if (nodes) *nodes = nullptr;
  if (edges) *edges = nullptr;
  if (count) *count = 0;
  return cudaStreamIsCapturing(stream, status);
}

API cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* wanted) {
  std::swap(*wanted, mode);
  return cudaSuccess;
}

API cudaError_t cudaStreamUpdateCaptureDependencies(cudaStream_t, cudaGraphNode_t*, const cudaGraphEdgeData*, size_t,
                                                    unsigned) {
  return fail(cudaErrorNotSupported);
}

// ---- graphs
static std::shared_ptr<Graph>& graph_of(const void* handle) { return *(std::shared_ptr<Graph>*)handle; }

API cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t* executable, cudaGraph_t graph, unsigned long long) {
  *executable = (cudaGraphExec_t) new std::shared_ptr<Graph>(graph_of(graph));
  return cudaSuccess;
}

API cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
  delete (std::shared_ptr<Graph>*)graph;
  return cudaSuccess;
}

API cudaError_t cudaGraphExecDestroy(cudaGraphExec_t graph) {
  delete (std::shared_ptr<Graph>*)graph;
  return cudaSuccess;
}

API cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t*, size_t* count) {
  *count = graph_of(graph)->nodes.size();
  return cudaSuccess;
}

API cudaError_t cudaGraphDebugDotPrint(cudaGraph_t, const char*, unsigned) { return cudaSuccess; }

API cudaError_t cudaGraphLaunch(cudaGraphExec_t handle, cudaStream_t on) {
  int stream = id_of(on);
  auto graph = graph_of(handle);
  {
    LOCKED;
    if (capturing(stream)) return refuse_in_capture(stream);
    launch(stream);
  }
  for (auto& node : graph->nodes) {
    if (node.kernel >= 0) {
      await_stream(stream);
      if (replay(node.kernel)) return fail(cudaErrorLaunchFailure);
      continue;
    }
    LOCKED;
    if (node.queues) {
      node.run(stream);
    } else {
      submit(stream, node.run);
    }
  }
  return cudaSuccess;
}
