//! Shared helpers of the mediation tests: guests and pseudorandom data.
#![allow(dead_code)]

pub mod model;
#[path = "../../../../driver/tests/it/common/random.rs"]
pub mod random;

use dma::{DmaMap, Memory, Prot};
use driver::iova::Registration;
use driver::{Device, Options};
use mediate::{DirectOptions, DirectQueue, Slice};
use model::Model;
use nvme::cmd::io::RwCdw12;
use nvme::{Command, NvmOpcode, Status};
#[allow(unused_imports)]
pub use random::Random;
use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Upper bound of every wait in the tests.
pub const LIMIT: Duration = Duration::from_secs(120);
pub const PAGE: u64 = 4096;
/// Guest address at which the memory of each guest begins.
pub const BASE: u64 = 0x10_0000;

/// A guest: its memory, its map, and its virtual queue pair.
pub struct Guest {
    // The queue goes first: it uses what follows.
    pub queue: DirectQueue,
    pub map: DmaMap,
    pub memory: Memory,
    pub registration: Option<Registration>,
    pub slice: Slice,
    pub ended: HashMap<u64, (Status, u32)>,
    next: u64,
}

pub fn open(model: &Arc<Model>, options: Options) -> Device {
    let transport: Arc<dyn driver::transport::Transport> = model.clone();
    Device::open(transport, options).unwrap()
}

impl Guest {
    /// Creates a guest with `memory` bytes at [`BASE`], all registered with the device, and a queue
    /// pair of its own.
    pub fn new(device: &Device, slice: Slice, memory: u64) -> Self {
        Self::with(device, DirectOptions::new(1, slice), memory)
    }

    pub fn with(device: &Device, options: DirectOptions, size: u64) -> Self {
        let queue = DirectQueue::reserve(device, options).unwrap();
        Self::on(device, queue, options.slice, size)
    }

    pub fn on(device: &Device, queue: DirectQueue, slice: Slice, size: u64) -> Self {
        let memory = Memory::anonymous(size as usize).unwrap();
        let mut map = DmaMap::new();
        map.map(BASE, size, Some((memory.clone(), 0)), Prot::RW)
            .unwrap();
        Guest {
            queue,
            map,
            registration: Some(device.register(&memory).unwrap()),
            memory,
            slice,
            ended: HashMap::new(),
            next: 1,
        }
    }

    /// Returns the device addresses of the guest's memory.
    pub fn device_range(&self) -> std::ops::Range<u64> {
        let region = self.registration.as_ref().unwrap().region();
        region.iova()..region.iova() + region.len()
    }

    pub fn submit(&mut self, command: &Command) -> Result<u64, Status> {
        let token = self.next;
        self.queue.submit(command, &self.map, token)?;
        self.next += 1;
        Ok(token)
    }

    pub fn poll(&mut self) -> usize {
        let ended = &mut self.ended;
        self.queue.poll(&mut |token, status, dw0| {
            assert!(ended.insert(token, (status, dw0)).is_none(), "twice over");
        })
    }

    pub fn wait(&mut self, token: u64) -> (Status, u32) {
        let start = Instant::now();
        loop {
            if let Some(end) = self.ended.remove(&token) {
                return end;
            }
            self.poll();
            assert!(start.elapsed() < LIMIT, "command {token} never ended");
        }
    }

    /// Submits a command, rings the doorbell, and waits for the completion.
    pub fn run(&mut self, command: &Command) -> Status {
        match self.submit(command) {
            Ok(token) => self.wait(token).0,
            Err(status) => status,
        }
    }

    pub fn drain(&mut self) {
        let start = Instant::now();
        while self.queue.in_flight() > 0 {
            self.poll();
            assert!(start.elapsed() < LIMIT, "commands never ended");
        }
    }

    pub fn write_memory(&self, iova: u64, bytes: &[u8]) {
        self.map.write(iova, bytes).unwrap();
    }

    pub fn read_memory(&self, iova: u64, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        self.map.read(iova, &mut bytes).unwrap();
        bytes
    }
}

/// Creates a read, write or compare command with PRPs.
pub fn rw(opcode: NvmOpcode, slba: u64, blocks: u32, prp1: u64, prp2: u64) -> Command {
    let mut command = Command::new(opcode.0, 7, 1);
    command.set_slba(slba);
    command.cdw12 = RwCdw12::new()
        .with_nlb_z((blocks - 1) as u16)
        .into_bits()
        .into();
    command.set_prps(prp1, prp2);
    command
}

/// Sets the PRPs of a command for `len` bytes at `data`, with a list at `list` if needed.
pub fn prps(guest: &Guest, command: &mut Command, data: u64, len: u64, list: u64) {
    let first = PAGE - data % PAGE;
    let second = data + first;
    let prp2 = if len <= first {
        0
    } else if len - first <= PAGE {
        second
    } else {
        let mut at = list;
        let mut pages: Vec<u64> = (0..(len - first).div_ceil(PAGE))
            .map(|i| second + i * PAGE)
            .collect();
        while !pages.is_empty() {
            let room = ((PAGE - at % PAGE) / 8) as usize;
            if pages.len() > room {
                let rest = pages.split_off(room - 1);
                let next = at / PAGE * PAGE + PAGE;
                pages.push(next);
                let bytes: Vec<u8> = pages.iter().flat_map(|p| p.to_le_bytes()).collect();
                guest.write_memory(at, &bytes);
                (at, pages) = (next, rest);
            } else {
                let bytes: Vec<u8> = pages.iter().flat_map(|p| p.to_le_bytes()).collect();
                guest.write_memory(at, &bytes);
                pages.clear();
            }
        }
        list
    };
    command.set_prps(data, prp2);
}
