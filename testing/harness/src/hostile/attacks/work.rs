//! Allowed commands of high cost, on the maximum of queues.

use anyhow::Result;
use nvme::cmd::io::RwCdw12;
use nvme::sgl::SglDescriptor;
use nvme::{Command, NvmOpcode};
use zerocopy::IntoBytes;

use super::Context;
use crate::hostile::client::nvme::{AT_DATA, AT_LISTS, Guest, RAM_BASE, RAM_SIZE};
use crate::hostile::test_daemon::{
    FILE_NSID, FILE_SIZE, LARGE_NSID, LARGE_SIZE, MEMORY_NSID, VOLUME_SIZE,
};

/// Queues of an attack.
const QUEUES: u16 = 16;
const SECTOR: u64 = 512;
/// Attribute Deallocate of Dataset Management (NVM Command Set 1.1, 3.2.3).
const DEALLOCATE: u32 = 4;

/// Builds a command for `blocks` blocks. Its data begins `data` bytes into the data area, modulo
/// its size; at most 2 pages, or a list of which every page is the same.
pub(super) fn transfer(opcode: NvmOpcode, nsid: u32, lba: u64, blocks: u32, data: u64) -> Command {
    let mut command = Command::new(opcode.0, 0, nsid);
    let size = if nsid == MEMORY_NSID {
        VOLUME_SIZE
    } else {
        FILE_SIZE
    };
    command.set_slba(lba % (size / SECTOR - u64::from(blocks)));
    let cdw12 = RwCdw12::new().with_nlb_z((blocks - 1) as u16);
    command.cdw12 = cdw12.into_bits().into();
    let room = RAM_SIZE - AT_DATA - (1 << 20);
    let at = RAM_BASE + AT_DATA + data % room / 4096 * 4096;
    let len = blocks * SECTOR as u32;
    if len <= 4096 {
        command.set_prps(at, 0);
    } else {
        command.set_sgl(SglDescriptor::data_block(at, len));
    }
    command
}

/// Reads and writes in turn.
pub(super) fn io(at: u16) -> NvmOpcode {
    if at.is_multiple_of(2) {
        NvmOpcode::READ
    } else {
        NvmOpcode::WRITE
    }
}

/// Keeps all queues full of the commands that `make` returns for queue and index.
fn storm(
    context: &Context,
    mut guest: Guest,
    mut make: impl FnMut(u16, u16) -> Command,
) -> Result<()> {
    for qid in 1..=QUEUES {
        guest.fill(qid, &mut |at| make(qid, at))?;
    }
    guest.storm(1..=QUEUES, |count| context.did(count))
}

/// Blocks in no order.
fn scattered(qid: u16, at: u16) -> u64 {
    (u64::from(qid) << 10 | u64::from(at)).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 20 & !7
}

pub(super) fn long_sgls(context: &Context) -> Result<()> {
    const PIECES: u32 = 8192;
    const PIECE: u32 = 128;
    let guest = Guest::up(&context.nvme(), QUEUES)?;
    for i in 0..PIECES {
        // No two of them are neighbours.
        let at = RAM_BASE + AT_DATA + u64::from(i) * 4096 % (RAM_SIZE - AT_DATA);
        let piece = SglDescriptor::data_block(at, PIECE);
        let to = AT_LISTS + u64::from(i) * 16;
        guest.ram.write(to as usize, piece.as_bytes())?;
    }
    storm(context, guest, |qid, at| {
        let blocks = PIECES * PIECE / SECTOR as u32;
        let mut command = transfer(NvmOpcode::READ, MEMORY_NSID, scattered(qid, at), blocks, 0);
        let list = RAM_BASE + AT_LISTS;
        command.set_sgl(SglDescriptor::last_segment(list, PIECES * 16));
        command
    })
}

pub(super) fn deep_file(context: &Context) -> Result<()> {
    let guest = Guest::up(&context.nvme(), QUEUES)?;
    storm(context, guest, |qid, at| {
        let data = u64::from(at) * 4096;
        transfer(NvmOpcode::READ, FILE_NSID, scattered(qid, at), 8, data)
    })
}

pub(super) fn deep_memory(context: &Context) -> Result<()> {
    let guest = Guest::up(&context.nvme(), QUEUES)?;
    storm(context, guest, |qid, at| {
        let data = u64::from(at) * 8192;
        transfer(NvmOpcode::READ, MEMORY_NSID, scattered(qid, at), 256, data)
    })
}

/// Writes ranges of Dataset Management into the list area; answers how many.
fn write_ranges(guest: &Guest, ranges: impl Iterator<Item = (u64, u32)>) -> Result<u32> {
    let mut count = 0;
    for (lba, blocks) in ranges {
        let range = [u64::from(blocks) << 32, lba];
        let to = AT_LISTS + u64::from(count) * 16;
        guest.ram.write(to as usize, range.as_bytes())?;
        count += 1;
    }
    Ok(count)
}

fn deallocate(nsid: u32, ranges: u32) -> Command {
    let mut command = Command::new(NvmOpcode::DATASET_MANAGEMENT.0, 0, nsid);
    command.set_prps(RAM_BASE + AT_LISTS, 0);
    command.cdw10 = (ranges - 1).into();
    command.cdw11 = DEALLOCATE.into();
    command
}

pub(super) fn zeroes(context: &Context) -> Result<()> {
    const BLOCKS: u32 = 1 << 16;
    let guest = Guest::up(&context.nvme(), QUEUES)?;
    let all = VOLUME_SIZE / SECTOR;
    // Ranges that are no whole pages have to be written.
    let odd = all - u64::from(BLOCKS) - 1;
    let ranges = write_ranges(&guest, (0..256).map(|i| (1 + i * 977 % odd, BLOCKS - 1)))?;
    storm(context, guest, |_, at| match at % 2 {
        0 => {
            let lba = u64::from(at) * 8 + 1;
            let mut command = Command::new(NvmOpcode::WRITE_ZEROES.0, 0, MEMORY_NSID);
            command.set_slba(lba % odd);
            command.cdw12 = (BLOCKS - 1).into();
            command
        }
        _ => deallocate(MEMORY_NSID, ranges),
    })
}

/// Filled blocks are punched at the end, too: the attack is not to leave data in a disk in memory.
pub(super) fn punch(context: &Context) -> Result<()> {
    let mut guest = Guest::up(&context.nvme(), 1)?;
    let size = if context.long { LARGE_SIZE } else { 128 << 20 };
    let (blocks, all) = (2048, size / SECTOR);
    let ranges = write_ranges(&guest, [(0, all as u32)].into_iter())?;
    while context.running() {
        // Filled, a few MiB at a time.
        let mut next = 0;
        while next < all && context.running() {
            let mut command = Command::new(NvmOpcode::WRITE.0, 0, LARGE_NSID);
            command.set_slba(next);
            let cdw12 = RwCdw12::new().with_nlb_z(blocks - 1);
            command.cdw12 = cdw12.into_bits().into();
            let len = u32::from(blocks) * SECTOR as u32;
            command.set_sgl(SglDescriptor::data_block(RAM_BASE + AT_DATA, len));
            guest.run(1, command)?;
            next += u64::from(blocks);
            context.did(1);
        }
        guest.run(1, deallocate(LARGE_NSID, ranges))?;
    }
    Ok(())
}

pub(super) fn compare(context: &Context) -> Result<()> {
    let guest = Guest::up(&context.nvme(), QUEUES)?;
    storm(context, guest, |qid, at| {
        let opcode = if at.is_multiple_of(2) {
            NvmOpcode::COMPARE
        } else {
            NvmOpcode::VERIFY
        };
        let blocks = 1 << (at % 12);
        let nsid = if at.is_multiple_of(3) {
            FILE_NSID
        } else {
            MEMORY_NSID
        };
        transfer(opcode, nsid, scattered(qid, at), blocks, 0)
    })
}

pub(super) fn flushes(context: &Context) -> Result<()> {
    let guest = Guest::up(&context.nvme(), QUEUES)?;
    storm(context, guest, |qid, at| {
        if at.is_multiple_of(2) {
            return Command::new(NvmOpcode::FLUSH.0, 0, FILE_NSID);
        }
        let mut command = transfer(NvmOpcode::WRITE, FILE_NSID, scattered(qid, at), 8, 0);
        let cdw12 = RwCdw12::from_bits(command.cdw12.get()).with_fua(true);
        command.cdw12 = cdw12.into_bits().into();
        command
    })
}

pub(super) fn bad_commands(context: &Context) -> Result<()> {
    let guest = Guest::up(&context.nvme(), QUEUES)?;
    storm(context, guest, |qid, at| {
        let mut command = transfer(NvmOpcode::READ, MEMORY_NSID, scattered(qid, at), 8, 0);
        match at % 6 {
            0 => command.opcode = 0x7f,
            1 => command.nsid = 77.into(),
            2 => command.set_slba(u64::MAX - 3),
            3 => command.set_prps(0x10, 0x20),
            4 => command.set_sgl(SglDescriptor::last_segment(RAM_BASE + AT_LISTS, 16 * 4096)),
            _ => command.set_prps(!0xfff, 0),
        }
        command
    })
}
