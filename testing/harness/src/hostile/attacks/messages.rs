//! Messages of vfio-user: too many, too long, too short, and messages with unread answers.

use std::io::{Read, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use anyhow::Result;
use vfio_user::client::RawClient;
use vfio_user::wire::{self, Command, HEADER_SIZE, Header, flags};
use zerocopy::IntoBytes;

use super::Context;
use crate::hostile::client::nvme::{
    ANSWER, BAR0, ENTRIES, Guest, MSIX, RAM_BASE, REG_CSTS, connect, mapping,
};
use crate::hostile::client::poison::{eventfd, memfd};

/// Questions that are asked before their answers are read.
const WINDOW: u64 = 64;

fn header(command: Command, size: u32, flags: u32) -> Header {
    Header {
        message_id: 7,
        command,
        message_size: size,
        flags,
        error: 0,
    }
}

pub(super) fn set_irqs(context: &Context) -> Result<()> {
    let mut client = connect(&context.nvme())?;
    let vectors = (0..16).map(|_| eventfd()).collect::<Result<Vec<_>>>()?;
    let fds: Vec<BorrowedFd<'_>> = vectors.iter().map(AsFd::as_fd).collect();
    let set = wire::IrqSet {
        argsz: size_of::<wire::IrqSet>() as u32,
        flags: wire::irq_set::ACTION_TRIGGER | wire::irq_set::DATA_EVENTFD,
        index: MSIX,
        start: 0,
        count: 16,
    };
    while context.did(WINDOW) {
        for _ in 0..WINDOW {
            let payload = [set.as_bytes()];
            client.send(Command::DEVICE_SET_IRQS, 0, &payload, &fds)?;
        }
        for _ in 0..WINDOW {
            client.raw().recv()?;
        }
    }
    Ok(())
}

fn read_question() -> wire::RegionAccess {
    wire::RegionAccess {
        offset: REG_CSTS,
        region: BAR0,
        count: 4,
    }
}

pub(super) fn region_reads(context: &Context) -> Result<()> {
    let mut client = connect(&context.nvme())?;
    let size = (HEADER_SIZE + size_of::<wire::RegionAccess>()) as u32;
    let head = header(Command::REGION_READ, size, flags::COMMAND);
    let one = [head.as_bytes(), read_question().as_bytes()].concat();
    let many = one.repeat(WINDOW as usize);
    while context.did(WINDOW) {
        client.raw().send(&many, &[])?;
        for _ in 0..WINDOW {
            client.raw().recv()?;
        }
    }
    Ok(())
}

pub(super) fn map_unmap(context: &Context) -> Result<()> {
    let mut client = connect(&context.nvme())?;
    let file = memfd(64 << 20)?;
    // Uses memory, so that each unmap has a mapping to remove.
    let mut turn = 0u64;
    while context.did(WINDOW) {
        for _ in 0..WINDOW / 2 {
            turn += 1;
            let window = mapping(
                RAM_BASE,
                4096 + turn % 64 * (1 << 20) / 64 * 4096 % (32 << 20),
                0,
            );
            let map = wire::DmaMap {
                argsz: size_of::<wire::DmaMap>() as u32,
                flags: wire::dma::READ | wire::dma::WRITE,
                offset: 0,
                address: window.iova,
                size: window.size,
            };
            client.send(Command::DMA_MAP, 0, &[map.as_bytes()], &[file.as_fd()])?;
            let unmap = wire::DmaUnmap {
                argsz: size_of::<wire::DmaUnmap>() as u32,
                flags: 0,
                address: window.iova,
                size: window.size,
            };
            client.send(Command::DMA_UNMAP, 0, &[unmap.as_bytes()], &[])?;
        }
        for _ in 0..WINDOW {
            client.raw().recv()?;
        }
    }
    Ok(())
}

pub(super) fn doorbells(context: &Context) -> Result<()> {
    let mut guest = Guest::attach(&context.nvme())?;
    guest.enable()?;
    guest.create_queues(16, None)?;
    let mut value = 1u32;
    while context.did(1) {
        value = value.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        let qid = (value >> 20) as u16 % 17;
        let wild = value & 0xf00 == 0;
        let tail = if wild {
            value
        } else {
            (value >> 8) % u32::from(ENTRIES)
        };
        let offset = nvme::regs::doorbell_offset(qid, value & 1 == 0, 0);
        let tail = tail.to_le_bytes();
        guest.client.region_write_posted(BAR0, offset, &tail)?;
    }
    Ok(())
}

pub(super) fn half(context: &Context) -> Result<()> {
    let mut ends = Vec::new();
    for len in [1, 5, 15, 16, 17, 20] {
        let mut raw = RawClient::connect(&context.nvme(), ANSWER)?;
        let head = header(Command::VERSION, 64, flags::COMMAND);
        let bytes = [head.as_bytes(), &[0; 48]].concat();
        let part = bytes.get(..len).unwrap_or(&bytes);
        let _ = raw.send(part, &[]);
        std::thread::sleep(Duration::from_millis(2));
        ends.push(raw);
        context.did(1);
    }
    drop(ends);
    let mut client = connect(&context.nvme())?;
    let file = memfd(4096)?;
    let head = header(Command::DMA_MAP, 48, flags::COMMAND);
    client.raw().send(head.as_bytes(), &[file.as_fd()])?;
    // A byte of the rest now and then, and never the last.
    for _ in 0..31 {
        client.raw().send(&[0], &[])?;
        if !context.did(1) {
            break;
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    Ok(())
}

pub(super) fn huge(context: &Context) -> Result<()> {
    for (size, early) in [
        (u32::MAX, true),
        (1 << 30, true),
        (u32::MAX, false),
        (1 << 30, false),
        (2 << 20, false),
        (1 << 20, false),
    ] {
        let mut raw = if early {
            UnixStream::connect(context.nvme())?
        } else {
            let client = connect(&context.nvme())?;
            client.as_fd().try_clone_to_owned()?.into()
        };
        raw.set_write_timeout(Some(Duration::from_millis(50)))?;
        let head = header(Command::REGION_WRITE, size, flags::COMMAND);
        let _ = raw.write_all(head.as_bytes());
        let chunk = vec![0; 64 << 10];
        for _ in 0..64 {
            if raw.write_all(&chunk).is_err() {
                break;
            }
        }
        if !context.did(1) {
            break;
        }
    }
    Ok(())
}

pub(super) fn never_reads(context: &Context) -> Result<()> {
    let client = connect(&context.nvme())?;
    let mut raw = UnixStream::from(client.as_fd().try_clone_to_owned()?);
    raw.set_write_timeout(Some(Duration::from_millis(100)))?;
    // A register of 4 KiB each: the whole of the doorbells.
    let question = wire::RegionAccess {
        offset: 0,
        region: 7,
        count: 256,
    };
    let size = (HEADER_SIZE + size_of::<wire::RegionAccess>()) as u32;
    let head = header(Command::REGION_READ, size, flags::COMMAND);
    let many = [head.as_bytes(), question.as_bytes()].concat().repeat(64);
    while raw.write_all(&many).is_ok() {
        context.did(64);
    }
    for _ in 0..20 {
        std::thread::sleep(Duration::from_millis(5));
        context.did(1);
    }
    // A little is read, so that there is room for a little.
    let mut some = [0; 4096];
    let _ = raw.read(&mut some);
    Ok(())
}

pub(super) fn state(context: &Context) -> Result<()> {
    let mut client = connect(&context.nvme())?;
    let mut number = 0u16;
    while context.did(1) {
        number = number.wrapping_add(1);
        let command = match number % 8 {
            0 => Command(number),
            1 => Command::DIRTY_PAGES,
            2 => Command::DMA_READ,
            3 => Command::DEVICE_GET_REGION_IO_FDS,
            _ => Command::DEVICE_FEATURE,
        };
        let fill = [
            number as u8 % 16,
            0,
            0,
            0,
            (number >> 4) as u8,
            0,
            (number >> 12) as u8,
            0,
        ];
        let payload = fill.repeat(usize::from(number % 9));
        client.send(command, 0, &[&payload], &[])?;
        // A few of these end the connection.
        client.raw().recv()?;
    }
    Ok(())
}
