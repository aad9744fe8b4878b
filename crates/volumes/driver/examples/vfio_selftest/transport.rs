//! The transport alone: limits, mappings, and the Admin queue by hand, with its interrupt,
//! before and after a reset.

use crate::{Outcome, ensure};
use dma::{Memory, Prot};
use driver::transport::{Mapping, Source, Transport};
use driver::vfio::Vfio;
use nvme::cmd::DataPointer;
use nvme::cmd::admin::{Cns, IdentifyCdw10};
use nvme::regs::{self, Cc};
use nvme::{AdminOpcode, Command, pci};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};
use zerocopy::{FromZeros, IntoBytes};

const MIB: u64 = 1 << 20;
/// Where interrupt messages go on x86: no memory can be mapped there.
const MESSAGES: u64 = 0xfee0_0000;
/// Layout of the memory: submission queue, completion queue, data, a page each.
const SQ: u64 = 0;
const CQ: u64 = 0x1000;
const DATA: u64 = 0x2000;
const ENTRIES: u32 = 4;

pub fn check(vfio: &Vfio) -> Outcome {
    mappings(vfio)?;
    let mut admin = Admin::new(vfio)?;
    for round in 0..2 {
        admin.enable()?;
        // More commands than entries, so that the phase turns.
        for _ in 0..2 * ENTRIES {
            admin.identify()?;
        }
        vfio.reset()?;
        let (cc, csts) = (vfio.read32(regs::CC)?, vfio.read32(regs::CSTS)?);
        ensure(
            cc & 1 == 0 && csts & 1 == 0,
            format!("round {round}: CC {cc:#x}, CSTS {csts:#x} after reset"),
        )?;
    }
    println!("admin queue by hand: Identify by DMA and MSI-X, before and after a reset");
    vfio.set_msix(&[])?;
    drop(admin);
    Ok(())
}

fn mappings(vfio: &Vfio) -> Outcome {
    let limits = vfio.dma_limits();
    println!(
        "{}: {} vectors, pages of {}, {} mappings, IOVAs {:x?}",
        vfio.interface(),
        vfio.msix_vectors(),
        limits.page_size,
        limits.max_mappings,
        limits.iova_ranges
    );
    ensure(vfio.msix_vectors() > 1, "fewer than two vectors")?;
    let memory = Memory::anonymous(2 * MIB as usize)?;
    let mapping = |iova| Mapping {
        iova,
        len: 2 * MIB,
        source: Source::File {
            memory: &memory,
            offset: 0,
        },
        prot: Prot::RW,
    };
    if cfg!(target_arch = "x86_64") {
        let reserved = limits
            .iova_ranges
            .iter()
            .any(|range| range.contains(&MESSAGES));
        ensure(!reserved, "the window of interrupt messages is offered")?;
        ensure(
            vfio.map(mapping(MESSAGES)).is_err(),
            "the window of interrupt messages was mapped",
        )?;
    }
    vfio.map(mapping(4 * MIB))?;
    ensure(vfio.map(mapping(5 * MIB)).is_err(), "an overlap was mapped")?;
    ensure(
        vfio.unmap(4 * MIB, MIB).is_err(),
        "half a mapping was unmapped",
    )?;
    vfio.unmap(4 * MIB, 2 * MIB)?;
    ensure(vfio.unmap(4 * MIB, 2 * MIB).is_err(), "unmapped twice")?;
    vfio.map(mapping(5 * MIB))?;
    vfio.unmap(5 * MIB, 2 * MIB)?;
    println!("mappings: made, refused and taken away");
    Ok(())
}

/// An Admin queue of four entries, driven by hand.
struct Admin<'a> {
    vfio: &'a Vfio,
    memory: Memory,
    iova: u64,
    interrupt: OwnedFd,
    /// Commands since it was enabled.
    sent: u32,
}

impl<'a> Admin<'a> {
    fn new(vfio: &'a Vfio) -> Outcome<Admin<'a>> {
        let memory = Memory::anonymous(0x4000)?;
        let admin = Admin {
            vfio,
            iova: 16 * MIB,
            interrupt: eventfd(0, EventfdFlags::CLOEXEC)?,
            memory,
            sent: 0,
        };
        vfio.map(Mapping {
            iova: admin.iova,
            len: 0x4000,
            source: Source::File {
                memory: &admin.memory,
                offset: 0,
            },
            prot: Prot::RW,
        })?;
        vfio.set_bus_master(true)?;
        // Vector 1 has none, so that a gap is tried too.
        vfio.set_msix(&[Some(admin.interrupt.as_fd()), None])?;
        Ok(admin)
    }

    fn enable(&mut self) -> Outcome {
        self.memory.write(0, &[0; 0x4000])?;
        self.sent = 0;
        let vfio = self.vfio;
        vfio.write32(regs::CC, 0)?;
        self.ready(false)?;
        vfio.write32(regs::AQA, (ENTRIES - 1) << 16 | (ENTRIES - 1))?;
        vfio.write64(regs::ASQ, self.iova + SQ)?;
        vfio.write64(regs::ACQ, self.iova + CQ)?;
        vfio.write32(
            regs::CC,
            Cc::new()
                .with_en(true)
                .with_iosqes(6)
                .with_iocqes(4)
                .into_bits(),
        )?;
        self.ready(true)
    }

    fn ready(&self, wanted: bool) -> Outcome {
        let deadline = Instant::now() + Duration::from_secs(30);
        while (self.vfio.read32(regs::CSTS)? & 1 == 1) != wanted {
            ensure(
                Instant::now() < deadline,
                format!("CSTS.RDY is not {wanted}"),
            )?;
            std::thread::yield_now();
        }
        Ok(())
    }

    /// Compares the vendor in Identify Controller with configuration space.
    fn identify(&mut self) -> Outcome {
        let mut command = Command::new_zeroed();
        command.opcode = AdminOpcode::IDENTIFY.0;
        command.cid = (self.sent as u16).into();
        command.cdw10 = IdentifyCdw10::new()
            .with_cns(Cns::CONTROLLER)
            .into_bits()
            .into();
        command.dptr = DataPointer::prp(self.iova + DATA, 0);
        let slot = self.sent % ENTRIES;
        self.memory
            .write(SQ as usize + 64 * slot as usize, command.as_bytes())?;
        self.memory.write(DATA as usize, &[0; 4096])?;
        self.sent += 1;
        let doorbell = self
            .vfio
            .doorbell(regs::DOORBELLS)
            .ok_or("no mapped doorbell")?;
        doorbell.ring(self.sent % ENTRIES);
        let mut ready = [PollFd::new(&self.interrupt, PollFlags::IN)];
        let limit = Timespec {
            tv_sec: 30,
            tv_nsec: 0,
        };
        ensure(
            poll(&mut ready, Some(&limit))? == 1,
            "no interrupt within 30 s",
        )?;
        rustix::io::read(&self.interrupt, &mut [0; 8])?;
        let status = self
            .memory
            .atomic_u32(CQ as usize + 16 * slot as usize + 12);
        let status = status.ok_or("no completion entry")?.load(Ordering::Acquire);
        let phase = ((self.sent - 1) / ENTRIES).is_multiple_of(2);
        ensure(
            (status >> 16 & 1 == 1) == phase,
            format!("phase in {status:#x}"),
        )?;
        ensure(
            status >> 17 == 0 && status & 0xffff == self.sent - 1,
            format!("status {status:#x}"),
        )?;
        let head = self
            .vfio
            .doorbell(regs::DOORBELLS + 4)
            .ok_or("no mapped doorbell")?;
        head.ring(self.sent % ENTRIES);
        let (mut told, mut real) = ([0; 2], [0; 2]);
        self.memory.read(DATA as usize, &mut told)?;
        self.vfio.read_config(pci::VENDOR_ID, &mut real)?;
        ensure(
            told == real,
            format!("vendor {told:02x?} in Identify, {real:02x?} in configuration space"),
        )
    }
}

impl Drop for Admin<'_> {
    fn drop(&mut self) {
        // No command may be outstanding when the memory is freed: the device was reset, and
        // unmapped memory is out of its reach.
        let _ = self.vfio.set_bus_master(false);
        let _ = self.vfio.unmap(self.iova, 0x4000);
    }
}
