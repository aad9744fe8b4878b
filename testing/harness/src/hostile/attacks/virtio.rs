//! Front-ends of vhost-user and their guests: long chains, large requests, too many messages.

use std::io::{Read, Write};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::time::Duration;

use anyhow::Result;
use vhost_blk::kind;
use vhost_blk::wire::{Region, SingleRegion, VringState, request};
use zerocopy::IntoBytes;

use super::Context;
use crate::hostile::client::poison::{eventfd, memfd};
use crate::hostile::client::virtio::{AT_DATA, Disk, Raw, SIZE, WRITE};
use crate::hostile::test_daemon::VOLUME_SIZE;

pub(super) fn chains(context: &Context) -> Result<()> {
    let mut disk = Disk::up(&context.vhost(), eventfd()?)?;
    disk.header(kind::IN, 0)?;
    // 126 pieces, header and status: a table as long as the queue.
    let pieces: Vec<(u64, u32)> = (0..u64::from(SIZE) - 2)
        .map(|i| (AT_DATA + i * 65_536 % (12 << 20), 512))
        .collect();
    disk.indirect(&pieces, WRITE)?;
    disk.storm(|count| context.did(count))
}

pub(super) fn discard(context: &Context) -> Result<()> {
    let mut disk = Disk::up(&context.vhost(), eventfd()?)?;
    disk.header(kind::WRITE_ZEROES, 0)?;
    // The maximum of segments, each as large as the disk.
    let sectors = (VOLUME_SIZE / 512) as u32;
    let mut segments = Vec::new();
    for i in 0..16u64 {
        segments.extend((1 + i).to_le_bytes());
        segments.extend((sectors.min(32 << 10) - 32).to_le_bytes());
        segments.extend(0u32.to_le_bytes());
    }
    disk.memory.write(AT_DATA as usize, &segments)?;
    disk.indirect(&[(AT_DATA, segments.len() as u32)], 0)?;
    let mut turns = 0;
    disk.storm(|count| {
        turns += 1;
        context.did(count) && turns < 1_000_000
    })
}

pub(super) fn messages(context: &Context) -> Result<()> {
    let mut disk = Disk::up(&context.vhost(), eventfd()?)?;
    let state = |num| VringState { index: 0, num };
    while context.did(64) {
        for _ in 0..16 {
            let enable = state(1);
            disk.raw
                .send(request::SET_VRING_ENABLE, enable.as_bytes(), &[])?;
            let fds = [disk.call.as_fd()];
            let index = 0u64;
            disk.raw
                .send(request::SET_VRING_CALL, index.as_bytes(), &fds)?;
            disk.raw
                .send(request::SET_VRING_ERR, index.as_bytes(), &fds)?;
            let fds = [disk.kick.as_fd()];
            disk.raw
                .send(request::SET_VRING_KICK, index.as_bytes(), &fds)?;
        }
        disk.raw.ask(request::GET_FEATURES)?;
    }
    Ok(())
}

pub(super) fn tables(context: &Context) -> Result<()> {
    let mut raw = Raw::connect(&context.vhost())?;
    raw.negotiate()?;
    let files = (0..16)
        .map(|_| memfd(16 << 20))
        .collect::<Result<Vec<_>>>()?;
    while context.did(16) {
        for (i, file) in files.iter().enumerate() {
            raw.share(file.as_fd(), 16 << 20)?;
            let at = (i as u64 + 1) << 32;
            let single = SingleRegion {
                padding: 0,
                region: Region {
                    guest_address: at,
                    size: 16 << 20,
                    user_address: at,
                    mmap_offset: 0,
                },
            };
            let fds = [file.as_fd()];
            raw.send(request::ADD_MEM_REG, single.as_bytes(), &fds)?;
            raw.send(request::REM_MEM_REG, single.as_bytes(), &[])?;
        }
        raw.ask(request::GET_FEATURES)?;
    }
    Ok(())
}

pub(super) fn half(context: &Context) -> Result<()> {
    for len in [1, 7, 12, 15] {
        let raw = Raw::connect(&context.vhost())?;
        let message = Raw::message(request::SET_FEATURES, &[0; 8]);
        let _ = raw.bytes(message.get(..len).unwrap_or(&message), &[]);
        std::thread::sleep(Duration::from_millis(2));
        context.did(1);
    }
    let mut raw = UnixStream::connect(context.vhost())?;
    raw.set_write_timeout(Some(Duration::from_millis(100)))?;
    let many = Raw::message(request::GET_FEATURES, &[]).repeat(64);
    while raw.write_all(&many).is_ok() {
        context.did(64);
    }
    std::thread::sleep(Duration::from_millis(50));
    let mut some = [0; 4096];
    raw.set_read_timeout(Some(Duration::from_millis(50)))?;
    let _ = raw.read(&mut some);
    Ok(())
}
