//! Files on a FUSE file system that falls silent, as memory and as anything else.

use std::fs::File;
use std::os::fd::AsFd;
use std::time::Duration;

use anyhow::{Context as _, Result};
use nvme::{Command as NvmeCommand, NvmOpcode};
use vfio_user::DmaMapping;
use vfio_user::client::RawClient;
use vfio_user::wire::{self, Command};
use vhost_blk::wire::request;
use zerocopy::IntoBytes;

use super::Context;
use crate::hostile::child::skip;
use crate::hostile::client::fuse;
use crate::hostile::client::nvme::{ANSWER, Guest, MSIX, RAM_BASE, RAM_SIZE, connect, mapping};
use crate::hostile::client::poison::keep;
use crate::hostile::client::virtio::Raw;

/// Files that are opened while the server still answers.
const FILES: usize = 48;

/// Opens files, and has the server fall silent.
fn files(context: &Context) -> Result<Vec<File>> {
    let point = fuse::mount_point(&context.dir);
    let open = |number: usize| {
        let path = point.join(number.to_string());
        File::options().read(true).write(true).open(path)
    };
    let files = (0..FILES).map(open).collect::<Result<Vec<_>, _>>()?;
    silence(context)?;
    Ok(files)
}

fn silence(context: &Context) -> Result<()> {
    File::create(fuse::silence(&context.dir))?;
    Ok(())
}

/// Sends them one by one. They are not closed here: a close would wait, too.
fn each(context: &Context, mut send: impl FnMut(&File) -> Result<()>) -> Result<()> {
    for file in files(context)? {
        if !context.did(1) {
            break;
        }
        if let Err(error) = send(&file) {
            println!("refused {error:#}");
        }
        keep(file);
        std::thread::sleep(Duration::from_millis(2));
    }
    context.rest();
    Ok(())
}

pub(super) fn dma_map(context: &Context) -> Result<()> {
    each(context, |file| {
        let mut client = connect(&context.nvme())?;
        client.dma_map(mapping(RAM_BASE, 4096, 0), Some(file.as_fd()))?;
        Ok(())
    })
}

pub(super) fn set_irqs(context: &Context) -> Result<()> {
    let mut early = false;
    each(context, |file| {
        early = !early;
        if early {
            let mut raw = RawClient::connect(&context.nvme(), ANSWER)?;
            raw.send(&[0; 16], &[file.as_fd()])?;
            let _ = raw.recv();
            return Ok(());
        }
        let mut client = connect(&context.nvme())?;
        let set = wire::IrqSet {
            argsz: size_of::<wire::IrqSet>() as u32,
            flags: wire::irq_set::ACTION_TRIGGER | wire::irq_set::DATA_EVENTFD,
            index: MSIX,
            start: 0,
            count: 1,
        };
        let fds = [file.as_fd()];
        client.send(Command::DEVICE_SET_IRQS, 0, &[set.as_bytes()], &fds)?;
        let _ = client.raw().recv();
        Ok(())
    })
}

pub(super) fn vhost(context: &Context) -> Result<()> {
    let mut turn = 0;
    each(context, |file| {
        turn += 1;
        let mut raw = Raw::connect(&context.vhost())?;
        raw.negotiate()?;
        let fds = [file.as_fd()];
        let index = 0u64;
        match turn % 3 {
            1 => raw.share(file.as_fd(), 4096)?,
            2 => raw.send(request::SET_VRING_CALL, index.as_bytes(), &fds)?,
            _ => raw.send(request::SET_VRING_KICK, index.as_bytes(), &fds)?,
        }
        let _ = raw.ask(request::GET_FEATURES);
        Ok(())
    })
}

/// The file may be read only: an overlay copies a file that is opened for writing. The file
/// system's name is none of the known remote ones, and a page of it is read from FUSE all the same.
pub(super) fn overlay(context: &Context) -> Result<()> {
    if let Err(error) = fuse::mount_overlay(&context.dir) {
        return Err(skip(format!("{error:#}")));
    }
    let point = fuse::overlay_point(&context.dir);
    let files: Vec<File> = (0..FILES)
        .map(|number| File::open(point.join(number.to_string())))
        .collect::<Result<_, _>>()
        .context("a file of the overlay")?;
    let mut silent = false;
    for file in files {
        let attempt = || -> Result<Guest> {
            let mut guest = Guest::attach(&context.nvme())?;
            guest.enable()?;
            let window = DmaMapping {
                write: false,
                ..mapping(RAM_BASE + RAM_SIZE, 4096, 0)
            };
            guest.client.dma_map(window, Some(file.as_fd()))?;
            guest.create_queue_at(RAM_BASE + RAM_SIZE)?;
            Ok(guest)
        };
        // Refused memory is an attack that was tried.
        if let Ok(mut guest) = attempt() {
            silence(context)?;
            silent = true;
            let read = NvmeCommand::new(NvmOpcode::READ.0, 0, 1);
            let _ = guest.run(1, read);
        }
        keep(file);
        if !context.did(1) {
            break;
        }
    }
    if !silent {
        silence(context)?;
    }
    context.rest();
    Ok(())
}
