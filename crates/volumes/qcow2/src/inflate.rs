//! Decompression of clusters on a few threads of the process. On a worker, it would delay other
//! clients by a hundred microseconds or more.

use crate::store::Store;
use crate::wait::wait;
use miniz_oxide::inflate::TINFLStatus;
use miniz_oxide::inflate::core::{DecompressorOxide, decompress, inflate_flags};
use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::task::{Poll, Waker};
use std::time::Duration;
use sync::Unpoisoned;
use volume::{IoError, IoErrorKind};

/// Maximum number of threads that decompress clusters.
const MAX_THREADS: usize = 4;
/// Idle time after which a decompressing thread ends.
const IDLE_LIMIT: Duration = Duration::from_secs(5);
/// Stack size of a decompressing thread in bytes.
const STACK: usize = 256 << 10;

/// Decompresses `from` (raw deflate, possibly followed by other data) to `len` bytes.
pub fn inflate(from: &[u8], len: usize) -> Option<Vec<u8>> {
    let mut to = vec![0; len];
    let mut decompressor = Box::<DecompressorOxide>::default();
    let flags = inflate_flags::TINFL_FLAG_USING_NON_WRAPPING_OUTPUT_BUF;
    let (status, _, made) = decompress(&mut decompressor, from, &mut to, 0, flags);
    // The stream need not end with the cluster.
    let whole = made == len && matches!(status, TINFLStatus::Done | TINFLStatus::HasMoreOutput);
    whole.then_some(to)
}

struct InflateJob {
    from: Vec<u8>,
    len: usize,
    done: Arc<Mutex<InflateResult>>,
}

#[derive(Default)]
struct InflateResult {
    result: Option<Option<Vec<u8>>>,
    waker: Option<Waker>,
}

#[derive(Default)]
struct State {
    due: VecDeque<InflateJob>,
    threads: usize,
    idle: usize,
}

struct InflatePool {
    state: Mutex<State>,
    due: Condvar,
}

/// Pool of the threads that decompress clusters for all images of the process.
static POOL: InflatePool = InflatePool {
    state: Mutex::new(State {
        due: VecDeque::new(),
        threads: 0,
        idle: 0,
    }),
    due: Condvar::new(),
};

impl InflatePool {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unpoisoned()
    }

    /// Passes work to a thread of the pool. Returns the work if no thread can be started.
    fn start(&'static self, work: InflateJob) -> Option<InflateJob> {
        let mut state = self.lock();
        state.due.push_back(work);
        if state.idle >= state.due.len() || state.threads >= MAX_THREADS {
            drop(state);
            self.due.notify_one();
            return None;
        }
        state.threads += 1;
        drop(state);
        let builder = std::thread::Builder::new()
            .name("inflate".into())
            .stack_size(STACK);
        if builder.spawn(move || self.run()).is_err() {
            let mut state = self.lock();
            state.threads -= 1;
            if state.threads == 0 {
                return state.due.pop_back();
            }
        }
        None
    }

    /// Runs the main loop of a thread that decompresses clusters.
    fn run(&self) {
        sync::leave_cpu();
        let mut state = self.lock();
        loop {
            if let Some(work) = state.due.pop_front() {
                drop(state);
                work.carry_out();
                state = self.lock();
                continue;
            }
            state.idle += 1;
            let (woken, waited) = self.due.wait_timeout(state, IDLE_LIMIT).unpoisoned();
            state = woken;
            state.idle -= 1;
            if waited.timed_out() && state.due.is_empty() {
                state.threads -= 1;
                return;
            }
        }
    }
}

impl InflateJob {
    fn carry_out(self) {
        let result = inflate(&self.from, self.len);
        let mut done = self.done.lock().unpoisoned();
        done.result = Some(result);
        if let Some(waker) = done.waker.take() {
            waker.wake();
        }
    }
}

/// Decompresses a cluster on a thread of the pool.
pub(crate) async fn inflate_elsewhere(
    store: &impl Store,
    from: Vec<u8>,
    len: usize,
) -> Result<Vec<u8>, IoError> {
    let done = Arc::<Mutex<InflateResult>>::default();
    let work = InflateJob {
        from,
        len,
        done: done.clone(),
    };
    if let Some(work) = POOL.start(work) {
        work.carry_out();
    }
    let result = wait(store, |context| {
        let mut done = done.lock().unpoisoned();
        match done.result.take() {
            Some(result) => Poll::Ready(result),
            None => {
                done.waker = Some(context.waker().clone());
                Poll::Pending
            }
        }
    })
    .await?;
    result.ok_or(IoErrorKind::MediaRead.into())
}

/// Cache of recently decompressed clusters of an image, by L2 entry.
pub(crate) struct Inflated {
    clusters: Mutex<VecDeque<(u64, Arc<Vec<u8>>)>>,
    most: usize,
}

/// Maximum size in bytes of an image's cache of decompressed clusters.
const MAX_CACHED_BYTES: u64 = 4 << 20;

impl Inflated {
    pub(crate) fn new(cluster_size: u64) -> Self {
        Self {
            clusters: Mutex::default(),
            most: (MAX_CACHED_BYTES / cluster_size).clamp(2, 64) as usize,
        }
    }

    pub(crate) fn find(&self, entry: u64) -> Option<Arc<Vec<u8>>> {
        let clusters = self.clusters.lock().unpoisoned();
        let found = clusters.iter().find(|(known, _)| *known == entry);
        found.map(|(_, bytes)| bytes.clone())
    }

    pub(crate) fn keep(&self, entry: u64, bytes: Arc<Vec<u8>>) {
        let mut clusters = self.clusters.lock().unpoisoned();
        if clusters.len() >= self.most {
            clusters.pop_front();
        }
        clusters.push_back((entry, bytes));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn deflated_data_is_inflated() {
        let data: Vec<u8> = (0..65536u32).map(|n| (n / 100) as u8).collect();
        let mut packed = miniz_deflate(&data);
        assert_eq!(inflate(&packed, data.len()).unwrap(), data);
        // Bytes behind the data in the last sector belong to another cluster.
        packed.extend([7; 300]);
        assert_eq!(inflate(&packed, data.len()).unwrap(), data);
        assert_eq!(inflate(&packed, data.len() + 1), None, "too short");
        assert_eq!(inflate(&packed[..packed.len() / 4], data.len()), None);
        assert_eq!(inflate(&[0xff; 64], 512), None);
        assert_eq!(inflate(&[], 512), None);
    }

    /// Encodes stored blocks: enough of the format for a test, without a compressor.
    fn miniz_deflate(data: &[u8]) -> Vec<u8> {
        let mut out = Vec::new();
        let mut chunks = data.chunks(1000).peekable();
        while let Some(chunk) = chunks.next() {
            out.push(u8::from(chunks.peek().is_none()));
            out.extend((chunk.len() as u16).to_le_bytes());
            out.extend((!(chunk.len() as u16)).to_le_bytes());
            out.extend(chunk);
        }
        out
    }
}
