//! What the driver's tests share: controllers in this process, a disk that remembers,
//! numbers that look random.
#![allow(dead_code)]

pub mod random;

use controller::{Controller, ControllerConfig, NamespaceConfig};
use driver::transport::Transport;
use driver::{CommandError, Completion, Device, DmaBuffer, Op, Options, QueuePair, Request};
use in_process::{self, Host, InProcess};
#[allow(unused_imports)]
pub use random::Random;
use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};
use volume::{Io, IoOptions, MemVolume, Volume};

/// No test waits longer for anything.
pub const LIMIT: Duration = Duration::from_secs(120);

pub fn namespace(nsid: u32, volume: Arc<dyn Volume>, block_size: u32) -> NamespaceConfig {
    NamespaceConfig {
        block_size,
        nguid: [nsid as u8; 16],
        eui64: [nsid as u8; 8],
        ..NamespaceConfig::new(nsid, volume)
    }
}

pub fn memory(size: u64) -> Arc<dyn Volume> {
    Arc::new(MemVolume::new(size).unwrap())
}

pub fn host(config: ControllerConfig, namespaces: Vec<NamespaceConfig>) -> Host {
    let io = Io::new(IoOptions::default());
    Host::new(Controller::new(0, config, namespaces, &io).unwrap(), io).unwrap()
}

/// A controller in this thread, stepped by the driver.
pub fn local(config: ControllerConfig, namespaces: Vec<NamespaceConfig>) -> Arc<InProcess> {
    in_process::local(host(config, namespaces))
}

pub fn disk(size: u64, block_size: u32) -> Arc<InProcess> {
    local(
        ControllerConfig::default(),
        vec![namespace(1, memory(size), block_size)],
    )
}

pub fn open(transport: &Arc<InProcess>, options: Options) -> Device {
    let transport: Arc<dyn Transport> = transport.clone();
    Device::open(transport, options).unwrap()
}

/// Options with time limits that are short enough for tests that wait for them.
pub fn impatient() -> Options {
    Options {
        command_timeout: Duration::from_millis(60),
        admin_timeout: Duration::from_secs(1),
        ..Options::default()
    }
}

/// Waits for everything in flight.
pub fn drain(queue: &mut QueuePair) -> Vec<Completion> {
    let mut done = Vec::new();
    let start = Instant::now();
    while queue.in_flight() > 0 {
        queue.poll(|completion| done.push(completion));
        assert!(
            start.elapsed() < LIMIT,
            "{} never completed: {:?}",
            queue.in_flight(),
            queue.counters()
        );
    }
    done
}

/// What a request in flight is to the model.
enum Doing {
    Write { lba: u64, data: Vec<u8> },
    Read { lba: u64, blocks: u64 },
    Zero { lba: u64, blocks: u64 },
    Compare { equal: bool },
    Other,
}

/// Returns whether a command was ended without effect, to be sent again (Command Interrupted).
fn is_interrupted(result: &Result<(), CommandError>) -> bool {
    matches!(result, Err(CommandError::Status(status)) if status.is(nvme::Status::COMMAND_INTERRUPTED))
}

/// Random I/O of every kind and size against an array of bytes. Requests in flight never overlap in
/// blocks that one of them writes, so what each must see is known.
pub struct Exerciser {
    pub disk: Vec<u8>,
    block: u64,
    blocks: u64,
    /// Blocks in use: written (true) or read.
    busy: Vec<(u64, u64, bool, u64)>,
    doing: HashMap<u64, Doing>,
    next: u64,
    pub random: Random,
    pub largest: u64,
    pub done: u64,
    /// Compares that the controller had no memory for.
    interrupted: u64,
    /// Slices of the arena in use: by whom.
    slices: [u64; 40],
}

impl Exerciser {
    pub fn new(size: u64, block: u64, largest: u64, seed: u64) -> Self {
        Exerciser {
            disk: vec![0; size as usize],
            block,
            blocks: size / block,
            busy: Vec::new(),
            doing: HashMap::new(),
            next: 1,
            random: Random(seed),
            largest,
            done: 0,
            interrupted: 0,
            slices: [0; 40],
        }
    }

    /// A range that nothing in flight excludes.
    fn range(&mut self, writes: bool) -> Option<(u64, u64)> {
        for _ in 0..20 {
            let most = match self.random.below(10) {
                0 => self.largest / self.block,
                1..4 => 64,
                _ => 9,
            };
            let len = 1 + self.random.below(most.min(self.blocks));
            let lba = self.random.below(self.blocks - len + 1);
            let clash = |&(a, n, w, _): &(u64, u64, bool, u64)| {
                (w || writes) && lba < a + n && a < lba + len
            };
            if !self.busy.iter().any(clash) {
                return Some((lba, len));
            }
        }
        None
    }

    fn bytes(&self, lba: u64, blocks: u64) -> std::ops::Range<usize> {
        (lba * self.block) as usize..((lba + blocks) * self.block) as usize
    }

    /// A buffer for so many bytes, somewhere inside a longer one, at any dword.
    fn buffer(
        &mut self,
        device: &Device,
        arena: &driver::iova::Registration,
        bytes: u64,
    ) -> DmaBuffer {
        if self.random.below(3) == 0 {
            return device.allocate(bytes as usize).unwrap();
        }
        let len = arena.region().len();
        // Only one request in flight may use a part of the arena.
        let slice = (len / 40) & !4095;
        let free = self.slices.iter().position(|&user| user == 0);
        let Some(free) = free.filter(|_| bytes + 4096 <= slice) else {
            return device.allocate(bytes as usize).unwrap();
        };
        self.slices[free] = self.next;
        let base = free as u64 * slice;
        let odd = self.random.below(1024) * 4;
        DmaBuffer::of(arena, base + odd, bytes).unwrap()
    }

    pub fn submit(
        &mut self,
        device: &Device,
        arena: &driver::iova::Registration,
        queue: &mut QueuePair,
    ) {
        let user_data = self.next;
        let kind = self.random.below(20);
        let writes = matches!(kind, 8..18);
        let Some((lba, blocks)) = self.range(writes) else {
            return;
        };
        let bytes = blocks * self.block;
        let (op, buffer, doing) = match kind {
            0..8 => {
                let buffer = self.buffer(device, arena, bytes);
                buffer.fill(0xA5).unwrap();
                (Op::Read, Some(buffer), Doing::Read { lba, blocks })
            }
            8..16 => {
                let mut data = vec![0; bytes as usize];
                for word in data.chunks_mut(8) {
                    let random = self.random.next().to_le_bytes();
                    word.copy_from_slice(&random[..word.len()]);
                }
                let buffer = self.buffer(device, arena, bytes);
                buffer.write(0, &data).unwrap();
                (
                    Op::Write { fua: kind == 8 },
                    Some(buffer),
                    Doing::Write { lba, data },
                )
            }
            16 => {
                let deallocate = self.random.below(2) == 0;
                (
                    Op::WriteZeroes {
                        fua: false,
                        deallocate,
                    },
                    None,
                    Doing::Zero { lba, blocks },
                )
            }
            17 => (Op::Deallocate, None, Doing::Zero { lba, blocks }),
            18 => {
                // A compare that is split may see several commands; each block
                // is compared all the same.
                let range = self.bytes(lba, blocks);
                let mut data = self.disk[range].to_vec();
                let equal = self.random.below(2) == 0;
                if !equal {
                    let at = self.random.below(bytes) as usize;
                    data[at] ^= 0x40;
                }
                let buffer = self.buffer(device, arena, bytes);
                buffer.write(0, &data).unwrap();
                (Op::Compare, Some(buffer), Doing::Compare { equal })
            }
            _ => (Op::Flush, None, Doing::Other),
        };
        let request = Request {
            op,
            lba,
            blocks,
            buffer,
            user_data,
        };
        match queue.submit(request) {
            Ok(()) => {
                if op != Op::Flush {
                    self.busy.push((lba, blocks, writes, user_data));
                }
                self.doing.insert(user_data, doing);
                self.next += 1;
            }
            Err(refused) => {
                assert_eq!(refused.why, driver::SubmitRefusal::Full);
                self.release(user_data);
            }
        }
    }

    fn release(&mut self, id: u64) {
        for user in self.slices.iter_mut().filter(|user| **user == id) {
            *user = 0;
        }
    }

    pub fn complete(&mut self, completion: Completion) {
        let id = completion.user_data;
        self.release(id);
        self.busy.retain(|b| b.3 != id);
        self.done += 1;
        match self.doing.remove(&id).expect("a completion of nothing") {
            Doing::Write { lba, data } => {
                completion.result.unwrap();
                let range = self.bytes(lba, data.len() as u64 / self.block);
                self.disk[range].copy_from_slice(&data);
            }
            Doing::Read { lba, blocks } => {
                completion.result.unwrap();
                let read = completion.buffer.unwrap();
                let mut bytes = vec![0; (blocks * self.block) as usize];
                read.read(0, &mut bytes).unwrap();
                let range = self.bytes(lba, blocks);
                assert!(
                    bytes == self.disk[range],
                    "read of {blocks} blocks at {lba} is wrong"
                );
            }
            Doing::Zero { lba, blocks } => {
                completion.result.unwrap();
                let range = self.bytes(lba, blocks);
                self.disk[range].fill(0);
            }
            // Large requests accumulate on a busy machine, and the controller's memory for
            // Compare is limited: the host is to send the command again.
            Doing::Compare { .. } if is_interrupted(&completion.result) => {
                self.interrupted += 1;
                assert!(self.interrupted < 20, "most compares have memory");
            }
            Doing::Compare { equal } => {
                assert_eq!(completion.result.is_ok(), equal, "{:?}", completion.result)
            }
            Doing::Other => completion.result.unwrap(),
        }
    }

    /// So many requests, up to `depth` at a time.
    pub fn run(&mut self, device: &Device, queue: &mut QueuePair, requests: u64, depth: usize) {
        self.run_with(device, queue, requests, depth, |_, _| {});
    }

    /// As [`Exerciser::run`], with something else to do at each turn.
    pub fn run_with(
        &mut self,
        device: &Device,
        queue: &mut QueuePair,
        requests: u64,
        depth: usize,
        mut turn: impl FnMut(u64, &mut QueuePair),
    ) {
        let depth = depth.min(40);
        let memory = dma::Memory::anonymous(16 << 20).unwrap();
        let arena = device.register(&memory).unwrap();
        let end = self.done + requests;
        let start = Instant::now();
        while self.done < end {
            turn(self.done, queue);
            for _ in 0..1 + self.random.below(depth as u64) {
                if self.doing.len() < depth {
                    self.submit(device, &arena, queue);
                }
            }
            let mut done = Vec::new();
            queue.poll(|completion| done.push(completion));
            done.into_iter()
                .for_each(|completion| self.complete(completion));
            assert!(start.elapsed() < LIMIT, "stuck: {:?}", queue.counters());
        }
        for completion in drain(queue) {
            self.complete(completion);
        }
        assert!(self.doing.is_empty());
    }

    /// Reads all of the disk and compares.
    pub fn verify(&self, queue: &mut QueuePair) {
        let mut bytes = vec![0; self.disk.len()];
        queue.read(0, &mut bytes).unwrap();
        assert!(
            bytes == self.disk,
            "the disk does not hold what was written"
        );
    }
}
