//! Memory files and windows: too large, too small, too many, and such that shrink.

use std::fs::File;
use std::os::fd::{AsFd, BorrowedFd};
use std::time::{Duration, Instant};

use anyhow::Result;
use nvme::sgl::SglDescriptor;
use nvme::{Command, NvmOpcode};
use rustix::fs::{FallocateFlags, fallocate};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use vfio_user::DmaUnmapping;
use vfio_user::client::ClientError;
use vfio_user::wire::{self, Command as Message};
use vhost_blk::wire::{Region, SingleRegion, request};
use zerocopy::IntoBytes;

use super::Context;
use crate::hostile::attacks::work::{io, transfer};
use crate::hostile::client::nvme::{AT_DATA, Guest, RAM_BASE, RAM_SIZE, connect, mapping};
use crate::hostile::client::poison::memfd;
use crate::hostile::client::virtio::Raw;
use crate::hostile::test_daemon::{FILE_NSID, MEMORY_NSID};
use nvme::cmd::io::RwCdw12;

/// First address of an attack's own windows.
const BASE: u64 = 0x10_0000_0000;

/// Sizes of files, the next one where the last no longer fits: no hole of the address space stays.
const SIZES: [u64; 7] = [
    2 << 40,
    128 << 30,
    8 << 30,
    512 << 20,
    32 << 20,
    2 << 20,
    64 << 10,
];

pub(super) fn huge(context: &Context) -> Result<()> {
    let mut client = connect(&context.nvme())?;
    let mut iova = BASE;
    for size in SIZES {
        for _ in 0..100 {
            let file = memfd(size)?;
            iova += 4096;
            let mapped = client.dma_map(mapping(iova, 4096, 0), Some(file.as_fd()));
            if !context.did(1) {
                return Ok(());
            }
            match mapped {
                Ok(()) => {}
                Err(ClientError::Refused { .. }) => break,
                Err(error) => return Err(error.into()),
            }
        }
    }
    context.rest();
    Ok(())
}

pub(super) fn huge_vhost(context: &Context) -> Result<()> {
    let mut raw = Raw::connect(&context.vhost())?;
    raw.negotiate()?;
    for i in 0..120 {
        let file = memfd(2 << 40)?;
        let single = SingleRegion {
            padding: 0,
            region: Region {
                guest_address: i * 4096,
                size: 4096,
                user_address: i * 4096,
                mmap_offset: 0,
            },
        };
        let fds = [file.as_fd()];
        raw.send(request::ADD_MEM_REG, single.as_bytes(), &fds)?;
        raw.ask(request::GET_FEATURES)?;
        if !context.did(1) {
            break;
        }
    }
    context.rest();
    Ok(())
}

/// Time in which windows are made, before they are used.
fn making(context: &Context) -> Duration {
    Duration::from_millis(if context.long { 1200 } else { 150 })
}

/// Sends a mapping and does not wait for its answer; those that have come are read now and then.
fn map_some(
    guest: &mut Guest,
    fd: BorrowedFd<'_>,
    windows: impl Iterator<Item = (u64, u64, u64)>,
) -> Result<()> {
    let mut sent = 0;
    for (iova, size, offset) in windows {
        let map = wire::DmaMap {
            argsz: size_of::<wire::DmaMap>() as u32,
            flags: wire::dma::READ | wire::dma::WRITE,
            offset,
            address: iova,
            size,
        };
        let client = &mut guest.client;
        client.send(Message::DMA_MAP, 0, &[map.as_bytes()], &[fd])?;
        sent += 1;
    }
    for _ in 0..sent {
        guest.client.raw().recv()?;
    }
    Ok(())
}

pub(super) fn tiny_windows(context: &Context) -> Result<()> {
    const BATCH: u64 = 32;
    let mut guest = Guest::up(&context.nvme(), 4)?;
    let file = memfd(1 << 20)?;
    let deadline = Instant::now() + making(context);
    let mut made = 0;
    while Instant::now() < deadline && made < 60_000 && context.did(BATCH) {
        let some = (made..made + BATCH).map(|i| (BASE + i, 1, i));
        map_some(&mut guest, file.as_fd(), some)?;
        made += BATCH;
    }
    let bytes = (made / 4096 * 4096).max(4096);
    let blocks = (bytes / 512) as u32;
    for qid in 1..=4 {
        guest.fill(qid, &mut |_| {
            let mut command = Command::new(NvmOpcode::WRITE.0, 0, MEMORY_NSID);
            let cdw12 = RwCdw12::new().with_nlb_z((blocks - 1) as u16);
            command.cdw12 = cdw12.into_bits().into();
            command.set_sgl(SglDescriptor::data_block(BASE, bytes as u32));
            command
        })?;
    }
    guest.storm(1..=4, |count| context.did(count))
}

pub(super) fn many_windows(context: &Context) -> Result<()> {
    const BATCH: u64 = 32;
    let mut guest = Guest::attach(&context.nvme())?;
    let file = memfd(1 << 30)?;
    while context.running() {
        let deadline = Instant::now() + making(context);
        let mut made = 0;
        while Instant::now() < deadline && made < 65_000 && context.did(BATCH) {
            // Every other page, so that none of them can be merged.
            let some = (made..made + BATCH).map(|i| (BASE + i * 8192, 4096, i * 8192));
            map_some(&mut guest, file.as_fd(), some)?;
            made += BATCH;
        }
        guest.client.dma_unmap(DmaUnmapping::All)?;
    }
    Ok(())
}

/// Raises the limit of descriptors to this process's maximum.
pub(super) fn raise_limit() -> Result<()> {
    let maximum = getrlimit(Resource::Nofile).maximum;
    let all = Rlimit {
        current: maximum,
        maximum,
    };
    Ok(setrlimit(Resource::Nofile, all)?)
}

pub(super) fn many_files(context: &Context) -> Result<()> {
    let mut client = connect(&context.nvme())?;
    let mut made = 0;
    while context.did(1) && made < 6000 {
        let file = memfd(4096)?;
        let window = mapping(BASE + made * 4096, 4096, 0);
        if client.dma_map(window, Some(file.as_fd())).is_err() {
            // The client keeps its windows.
            break;
        }
        made += 1;
    }
    // With no descriptor left, each that connects is a problem.
    while context.did(1) {
        let more = connect_once(context);
        std::thread::sleep(Duration::from_millis(1));
        drop(more);
    }
    Ok(())
}

fn connect_once(context: &Context) -> Result<Raw> {
    Raw::connect(&context.vhost())
}

pub(super) fn shrinking(context: &Context) -> Result<()> {
    let mut guest = Guest::up(&context.nvme(), 4)?;
    for qid in 1..=4 {
        let nsid = if qid % 2 == 0 { MEMORY_NSID } else { FILE_NSID };
        guest.fill(qid, &mut |at| {
            let opcode = io(at);
            transfer(opcode, nsid, u64::from(at) * 8, 8, u64::from(at) * 4096)
        })?;
    }
    let deadline = Instant::now() + Duration::from_millis(30);
    guest.storm(1..=4, |count| {
        context.did(count) && Instant::now() < deadline
    })?;
    let file = File::from(guest.ram.fd().try_clone_to_owned()?);
    for size in [RAM_SIZE / 2, AT_DATA, 0x10_0000, 0] {
        file.set_len(size)?;
        // The doorbells by message: the pages of those in memory may be gone.
        for qid in 0..=4 {
            let offset = nvme::regs::doorbell_offset(qid, false, 0);
            let value = (size as u32 / 7 % 1024).to_le_bytes();
            guest.client.region_write_posted(0, offset, &value)?;
        }
        std::thread::sleep(Duration::from_millis(2));
    }
    // The window stays, on memory that no longer exists.
    guest.client.dma_unmap(DmaUnmapping::Range {
        iova: RAM_BASE,
        size: RAM_SIZE,
    })?;
    Ok(())
}

/// A page fault in a range that is being punched waits until the whole range has been (tmpfs).
pub(super) fn punched(context: &Context) -> Result<()> {
    let size: u64 = if context.long { 1 << 30 } else { 64 << 20 };
    let file = memfd(size)?;
    let mut guest = Guest::up(&context.nvme(), 2)?;
    guest
        .client
        .dma_map(mapping(BASE, size, 0), Some(file.as_fd()))?;
    for qid in 1..=2 {
        guest.fill(qid, &mut |at| {
            let mut command = transfer(NvmOpcode::READ, MEMORY_NSID, u64::from(at) * 8, 8, 0);
            let page = u64::from(at) * 0x9e37_79b9 % (size / 4096);
            command.set_prps(BASE + page * 4096, 0);
            command
        })?;
    }
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while context.running() {
                let punch = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
                // Without memory there is nothing to punch.
                let filled = fallocate(&file, FallocateFlags::empty(), 0, size);
                let _ = filled.and_then(|()| fallocate(&file, punch, 0, size));
            }
        });
        guest.storm(1..=2, |count| context.did(count))
    })
}
