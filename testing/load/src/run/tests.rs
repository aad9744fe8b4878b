use super::*;
use crate::job::Rw;
use crate::lane::Geometry;
use std::collections::VecDeque;
use std::sync::Mutex;

/// Target in memory that completes I/Os out of order, with one injected fault.
struct Memory {
    data: Mutex<Vec<u8>>,
    /// Offset of a write that is lost.
    loses: Option<u64>,
    /// Offset of an I/O that fails.
    fails: Option<u64>,
    /// Index of the I/O of a queue before which the target stops once, and for how long.
    stands: Option<(u64, Duration)>,
}

struct MemoryLane<'a> {
    target: &'a Memory,
    bytes: usize,
    buffers: Vec<Vec<u8>>,
    /// I/Os that were submitted and started.
    waiting: VecDeque<(u16, bool, u64)>,
    begun: Vec<(u16, bool, u64)>,
    ended: u64,
}

impl Memory {
    fn new(size: usize) -> Self {
        Self {
            data: Mutex::new(vec![0; size]),
            loses: None,
            fails: None,
            stands: None,
        }
    }
}

impl<'a> Target for &'a Memory {
    type Lane = MemoryLane<'a>;

    fn geometry(&self) -> Geometry {
        Geometry {
            size: self.data.lock().unwrap().len() as u64,
            block_size: 512,
            description: String::new(),
        }
    }

    fn lane(&self, _: u16, depth: u16, bytes: usize) -> Result<MemoryLane<'a>> {
        Ok(MemoryLane {
            target: self,
            bytes,
            buffers: vec![vec![0; bytes]; usize::from(depth)],
            waiting: VecDeque::new(),
            begun: Vec::new(),
            ended: 0,
        })
    }
}

impl Lane for MemoryLane<'_> {
    fn submit(&mut self, slot: u16, write: bool, offset: u64) -> Result<()> {
        self.waiting.push_back((slot, write, offset));
        Ok(())
    }

    fn kick(&mut self) -> Result<()> {
        self.begun.extend(self.waiting.drain(..));
        Ok(())
    }

    fn poll(&mut self, done: &mut impl FnMut(u16, IoResult)) -> Result<usize> {
        // The last one first.
        let Some((slot, write, offset)) = self.begun.pop() else {
            return Ok(0);
        };
        self.ended += 1;
        if let Some((at, span)) = self.target.stands
            && at == self.ended
        {
            std::thread::sleep(span);
        }
        let mut data = self.target.data.lock().unwrap();
        let range = offset as usize..offset as usize + self.bytes;
        let buffer = &mut self.buffers[usize::from(slot)];
        match write {
            true if self.target.loses == Some(offset) => {}
            true => data[range].copy_from_slice(buffer),
            false => buffer.copy_from_slice(&data[range]),
        }
        let fails = self.target.fails == Some(offset);
        done(
            slot,
            if fails {
                Err("declared".into())
            } else {
                Ok(())
            },
        );
        Ok(1)
    }

    fn wait(&mut self, _: Duration, done: &mut impl FnMut(u16, IoResult)) -> Result<usize> {
        self.poll(done)
    }

    fn put(&mut self, slot: u16, data: &[u8]) {
        self.buffers[usize::from(slot)].copy_from_slice(data);
    }

    fn get(&self, slot: u16, data: &mut [u8]) {
        data.copy_from_slice(&self.buffers[usize::from(slot)]);
    }
}

fn job(rw: Rw) -> Job {
    Job {
        rw,
        depth: 7,
        queues: 2,
        ios: Some(1000),
        verify: true,
        ..Job::default()
    }
}

#[test]
fn each_queue_does_requested_ios() {
    let memory = Memory::new(1 << 20);
    let measured = run(&&memory, &job(Rw::RandMixed), &mut ()).unwrap();
    assert_eq!(measured.read.ios + measured.write.ios, 2000);
    assert_eq!(measured.submitted, 2000);
    // Seven fit at a time.
    assert!(measured.kicks < 2000, "{}", measured.kicks);
    assert!(measured.read.ios > 800 && measured.write.ios > 800);
    assert!(
        (200..=256).contains(&measured.verified),
        "{}",
        measured.verified
    );
    assert!(!measured.both().latency.is_empty());
}

#[test]
fn sample_option_limits_timed_ios() {
    let memory = Memory::new(1 << 20);
    for (sample, timed) in [(0, 0), (1, 1000), (7, 143), (5000, 1)] {
        let job = Job {
            sample: Some(sample),
            queues: 1,
            ..job(Rw::RandMixed)
        };
        let measured = run(&&memory, &job, &mut ()).unwrap();
        assert_eq!(measured.both().latency.len(), timed, "one in {sample}");
        assert!(measured.verified > 0);
    }
}

#[test]
fn doorbell_is_rung_once_per_batch() {
    let memory = Memory::new(1 << 20);
    for (batch, kicks) in [(1, 2000..=2000), (2, 1000..=2000)] {
        let job = Job {
            batch,
            verify: false,
            ..job(Rw::RandMixed)
        };
        let measured = run(&&memory, &job, &mut ()).unwrap();
        assert_eq!(measured.submitted, 2000);
        assert!(kicks.contains(&measured.kicks), "{}", measured.kicks);
    }
}

#[test]
fn runtime_ends_job_without_counting_ramp() {
    let memory = Memory::new(1 << 20);
    let job = Job {
        ios: None,
        ramp: Duration::from_millis(20),
        runtime: Duration::from_millis(50),
        ..job(Rw::RandRead)
    };
    let job = Job {
        verify: false,
        interrupt: true,
        ..job
    };
    let measured = run(&&memory, &job, &mut ()).unwrap();
    assert!(measured.elapsed >= Duration::from_millis(40));
    assert!(
        measured.elapsed < STRAGGLER_TIMEOUT,
        "the queues see it for themselves"
    );
    assert!(measured.read.ios > 0 && measured.write.ios == 0);
}

#[test]
fn lost_write_is_detected() {
    for rw in [Rw::Write, Rw::RandWrite, Rw::RandMixed] {
        let memory = Memory {
            loses: Some(4096 * 3),
            ..Memory::new(64 << 10)
        };
        let error = run(&&memory, &job(rw), &mut ()).unwrap_err().to_string();
        assert!(error.contains("wrong data at offset 12288"), "{error}");
    }
}

#[test]
fn data_of_one_job_is_verified_by_other() {
    let memory = Memory::new(64 << 10);
    run(&&memory, &job(Rw::Write), &mut ()).unwrap();
    run(&&memory, &job(Rw::RandRead), &mut ()).unwrap();
    memory.data.lock().unwrap()[5000] ^= 1;
    let error = run(&&memory, &job(Rw::Read), &mut ())
        .unwrap_err()
        .to_string();
    assert!(error.contains("wrong data at offset 5000"), "{error}");
}

#[test]
fn error_names_offset_and_ends_job() {
    let memory = Memory {
        fails: Some(8192),
        ..Memory::new(64 << 10)
    };
    let job = Job {
        verify: false,
        ..job(Rw::RandRead)
    };
    let error = run(&&memory, &job, &mut ()).unwrap_err().to_string();
    assert_eq!(error, "read at offset 8192: declared");
}

#[test]
fn invalid_jobs_are_refused() {
    let memory = Memory::new(4096);
    let text = |job: Job| run(&&memory, &job, &mut ()).unwrap_err().to_string();
    assert!(text(job(Rw::Read)).contains("less than one I/O"));
    let odd = Job {
        bs: 1000,
        ..job(Rw::Read)
    };
    assert!(text(odd).contains("block size"));
    let cpu = Job {
        cpus: vec![usize::MAX],
        queues: 1,
        ..job(Rw::Read)
    };
    assert!(text(cpu).contains("CPU"));
}

#[test]
fn stalled_target_counts_as_gap() {
    let span = Duration::from_millis(30);
    let mut memory = Memory::new(1 << 20);
    memory.stands = Some((5, span));
    let one = Job {
        queues: 1,
        ios: Some(200),
        sample: Some(1),
        verify: false,
        ..job(Rw::RandRead)
    };
    let measured = run(&&memory, &one, &mut ()).unwrap();
    assert!(measured.gaps >= span, "{measured:?}");
    assert!(measured.gaps <= measured.elapsed, "{measured:?}");
    // The gap is at the end: it is followed only by the I/O that ends the job.
    memory.stands = Some((200, span));
    let measured = run(&&memory, &one, &mut ()).unwrap();
    assert!(measured.gaps >= span, "{measured:?}");
}
