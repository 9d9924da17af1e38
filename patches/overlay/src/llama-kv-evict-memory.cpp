// what the cells take in memory, and giving it back

#include "llama-kv-evict.h"

#include "llama-kv-cache.h"
#include "llama-kv-cache-iswa.h"
#include "llama-memory-hybrid.h"
#include "llama-memory-hybrid-iswa.h"

#include <algorithm>

#if defined(__linux__)
#include <sys/mman.h>
#include <unistd.h>
#endif

//
// pages of a buffer that nothing needs
//

#if defined(__linux__)

static bool is_paged(const ggml_tensor * t) {
    return ggml_backend_buffer_get_type(t->buffer) == ggml_backend_cpu_buffer_type();
}

// the whole pages inside [begin, end): they read as zeros until they are written again
static void release_pages(char * begin, char * end) {
    const uintptr_t page = sysconf(_SC_PAGESIZE);
    const uintptr_t p0   = GGML_PAD((uintptr_t) begin, page);
    const uintptr_t p1   = (uintptr_t) end/page*page;

    if (p0 < p1) {
        madvise((void *) p0, p1 - p0, MADV_DONTNEED);
    }
}

// physical memory behind [begin, end)
static size_t resident_bytes(char * begin, char * end) {
    const uintptr_t page = sysconf(_SC_PAGESIZE);
    const uintptr_t p0   = (uintptr_t) begin/page*page;
    const uintptr_t p1   = GGML_PAD((uintptr_t) end, page);

    std::vector<unsigned char> pages((p1 - p0)/page);
    if (mincore((void *) p0, p1 - p0, pages.data()) != 0) {
        return end - begin;
    }

    const size_t size = page*std::count_if(pages.begin(), pages.end(), [](unsigned char p) { return p & 1; });

    return std::min<size_t>(size, end - begin);
}

#else

static bool   is_paged(const ggml_tensor *)         { return false; }
static void   release_pages(char *, char *)         {}
static size_t resident_bytes(char * begin, char * end) { return end - begin; }

#endif

// cells [c0, ne[1]) of a stream
static void release_cells(const ggml_tensor * t, uint32_t s, uint32_t c0, bool is_transposed) {
    if (!is_paged(t)) {
        return;
    }

    char * data = (char *) t->data + s*t->nb[2];

    if (!is_transposed || c0 == 0) {
        release_pages(data + c0*t->nb[1], data + t->nb[2]);
        return;
    }

    // a row of all cells per channel: what is given back are the whole pages inside each
    const size_t size = t->ne[1]*t->nb[0];
    for (int64_t i = 0; i < t->ne[0]; ++i, data += size) {
        release_pages(data + c0*t->nb[0], data + size);
    }
}

//
// llama_kv_evict
//

void llama_kv_evict::release() {
    for (uint32_t s = 0; s < seqs.size(); ++s) {
        release(s, 0, kv.layers.size());
    }
}

bool llama_kv_evict::release(uint32_t s, size_t il0, size_t il1) {
    if (!kv.sc_info.empty()) {
        return false; // a pending copy reads cells that may be gone already
    }

    const uint32_t c0 = kv.v_cells[s].used_max_p1();

    for (size_t il = il0; il < il1; ++il) {
        const auto & layer = kv.layers[il];

        release_cells(layer.k, s, c0, false);
        release_cells(layer.v, s, c0, kv.v_trans);
    }

    return true;
}

void llama_kv_evict::get_bytes(llama_memory_i & memory, llama_kv_evict_stats & stats) const {
    std::vector<const llama_kv_cache *> caches = { &kv };

    if (const auto * iswa = dynamic_cast<llama_kv_cache_iswa *>(&memory)) {
        caches.push_back(iswa->get_swa());
    } else if (const auto * hybrid = dynamic_cast<llama_memory_hybrid_iswa *>(&memory)) {
        caches.push_back(hybrid->get_mem_attn()->get_swa());
    }

    for (const auto * cache : caches) {
        size_t n_used = 0;
        for (const auto & cells : cache->v_cells) {
            n_used += cells.get_used();
        }

        const size_t n_cells = (size_t) cache->get_size()*cache->n_stream;

        for (const auto & layer : cache->layers) {
            for (const auto * t : { layer.k, layer.v }) {
                const size_t size = ggml_nbytes(t);

                stats.kv_bytes          += size;
                stats.kv_bytes_used     += size/n_cells*n_used;
                stats.kv_bytes_resident += is_paged(t) ? resident_bytes((char *) t->data, (char *) t->data + size) : size;
            }
        }
    }
}
