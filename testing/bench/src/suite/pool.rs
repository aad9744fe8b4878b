//! Many queues on one thread: lanes of several controllers or of one controller, loaded like a
//! single lane.

use anyhow::{Context, Result};
use load::device::DeviceTarget;
use load::job::Job;
use load::lane::{Geometry, IoResult, Lane, Target};
use std::time::Duration;

/// Targets of one type. One thread loads their queues.
pub struct TargetPool<T = DeviceTarget> {
    targets: Vec<T>,
    /// Number of targets that are loaded, from the first on.
    busy: usize,
    /// Number of queues opened on each target.
    open: u16,
    /// Number of queues loaded on each target.
    loaded: u16,
}

impl TargetPool {
    /// Opens a controller with `open` queues, of which `loaded` are loaded.
    pub fn queues(url: &str, job: &Job, open: u16, loaded: u16) -> Result<TargetPool> {
        let job = Job {
            queues: open,
            ..job.clone()
        };
        Ok(TargetPool {
            targets: vec![DeviceTarget::open(url, &job)?],
            busy: 1,
            open,
            loaded,
        })
    }

    /// Opens controllers with one queue each, of which `busy` are loaded. The others have only
    /// their admin queue.
    pub fn controllers(urls: &[String], job: &Job, busy: usize) -> Result<TargetPool> {
        let targets = urls.iter().map(|url| DeviceTarget::open(url, job));
        Ok(TargetPool {
            targets: targets.collect::<Result<_>>()?,
            busy: busy.min(urls.len()),
            open: 1,
            loaded: 1,
        })
    }
}

impl<T> TargetPool<T> {
    fn loaded_queues(&self) -> u16 {
        self.busy as u16 * self.loaded
    }

    /// Returns the job for the single thread, with as many I/Os in flight as all queues have
    /// together.
    pub fn job(&self, job: &Job) -> Job {
        let queues = self.loaded_queues();
        Job {
            depth: job.depth.saturating_mul(queues),
            queues: 1,
            ..job.clone()
        }
    }
}

impl<T: Target> Target for TargetPool<T> {
    type Lane = PoolLane<T::Lane>;

    fn geometry(&self) -> Geometry {
        let mut all = self.targets.iter().map(T::geometry);
        let first = all.next().unwrap_or(Geometry {
            size: 0,
            block_size: 512,
            description: String::new(),
        });
        all.fold(first, |a, b| Geometry {
            size: a.size.min(b.size),
            ..a
        })
    }

    fn lane(&self, _index: u16, depth: u16, bytes: usize) -> Result<Self::Lane> {
        let queues = self.loaded_queues();
        let each = (depth / queues.max(1)).max(1);
        let (mut lanes, mut idle) = (Vec::new(), Vec::new());
        // The remaining targets exist, and have only their admin queue.
        for target in self.targets.iter().take(self.busy) {
            for index in 0..self.open {
                let lane = target.lane(index, each, bytes)?;
                if index < self.loaded {
                    lanes.push((lane, false));
                } else {
                    idle.push(lane);
                }
            }
        }
        Ok(PoolLane {
            lanes,
            _idle: idle,
            each,
        })
    }
}

/// Several lanes on one thread. Slot `s` is slot `s % each` of lane `s / each`.
pub struct PoolLane<L> {
    /// Lanes, each with a flag whether an I/O was submitted since the last kick.
    lanes: Vec<(L, bool)>,
    /// Lanes that are open and not loaded.
    _idle: Vec<L>,
    each: u16,
}

impl<L> PoolLane<L> {
    #[inline]
    fn lane(&self, slot: u16) -> Option<&L> {
        self.lanes
            .get(usize::from(slot / self.each))
            .map(|(lane, _)| lane)
    }

    #[inline]
    fn lane_mut(&mut self, slot: u16) -> Option<&mut (L, bool)> {
        self.lanes.get_mut(usize::from(slot / self.each))
    }
}

impl<L: Lane> Lane for PoolLane<L> {
    #[inline]
    fn submit(&mut self, slot: u16, write: bool, offset: u64) -> Result<()> {
        let inner = slot % self.each;
        let (lane, touched) = self.lane_mut(slot).context("no lane for this slot")?;
        *touched = true;
        lane.submit(inner, write, offset)
    }

    #[inline]
    fn kick(&mut self) -> Result<()> {
        for (lane, touched) in &mut self.lanes {
            if std::mem::take(touched) {
                lane.kick()?;
            }
        }
        Ok(())
    }

    #[inline]
    fn poll(&mut self, done: &mut impl FnMut(u16, IoResult)) -> Result<usize> {
        if let [(only, _)] = self.lanes.as_mut_slice() {
            return only.poll(done);
        }
        let mut count = 0;
        let mut base = 0;
        for (lane, _) in &mut self.lanes {
            count += lane.look(&mut |slot, outcome| done(base + slot, outcome))?;
            base += self.each;
        }
        Ok(count)
    }

    fn wait(&mut self, limit: Duration, done: &mut impl FnMut(u16, IoResult)) -> Result<usize> {
        // With one queue it can sleep; with more it looks at each in turn.
        match self.lanes.as_mut_slice() {
            [(only, _)] => only.wait(limit, done),
            _ => self.poll(done),
        }
    }

    fn put(&mut self, slot: u16, data: &[u8]) {
        let inner = slot % self.each;
        if let Some((lane, _)) = self.lane_mut(slot) {
            lane.put(inner, data);
        }
    }

    fn get(&self, slot: u16, data: &mut [u8]) {
        if let Some(lane) = self.lane(slot) {
            lane.get(slot % self.each, data);
        }
    }
}
