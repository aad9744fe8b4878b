//! Resets (NVMe Base 2.1, 3.7; NVMe over PCIe Transport 1.1, 3.7).

use crate::bytes::{pattern, u32_at};
use crate::case::{Need::*, cases};
use crate::host::{Host, QUIET_TIME, nvm};
use crate::verdict::{Check, Expect, applies_if, failed, require, same};
use nvme::{NvmOpcode, regs};

cases! {
    reset_conventional, ["6.1"], Always, Io, "Base 2.1, 3.7.2",
        "a reset of the device (what a VMM does for a conventional reset): registers as at \
         power-on, data kept";
    reset_function_level, ["6.2"], If("FLR"), Io, "PCIe Transport 1.1, 3.7.1",
        "a function level reset: registers as at power-on, data kept";
    reset_controller, ["6.3"], Always, Io, "Base 2.1, 3.7.2",
        "a controller reset removes I/O queues, and they can be made again";
    reset_controller_with_commands, ["6.3"], Always, Io, "Base 2.1, 3.7.2",
        "a controller reset with commands in flight ends; afterwards no memory is written";
    reset_controller_often, ["6.3"], Always, Io, "Base 2.1, 3.7.2",
        "a controller can be reset over and over";
    reset_subsystem, ["6.4"], If("CAP.NSSRS"), Io, "Base 2.1, 3.7.1, 3.1.4.7",
        "an NVM subsystem reset disables the controller, and CSTS.NSSRO tells until it is cleared";
    reset_subsystem_other_value, ["6.4"], If("CAP.NSSRS"), Admin, "Base 2.1, 3.1.4.7",
        "NSSR does nothing for any other value, and reads as zero";
    reset_subsystem_absent, ["6.4"], If("CAP.NSSRS is 0"), Admin, "Base 2.1, 3.1.4.7",
        "without subsystem reset NSSR does nothing";
    reset_keeps_identity, [], Always, Admin, "Base 2.1, 3.7.2",
        "a controller reset does not change what Identify says";
    disconnect_keeps_data, [], Always, Io, "Base 2.1, 3.7.2",
        "data that were written before a reset of the device are there after it";
}

fn again(host: &mut Host) -> Check {
    host.enable()?;
    let entries = host.io_entries();
    host.create_pair(1, entries)
}

fn registers_at_power_on(host: &mut Host, what: &str) -> Check {
    same!(host.read32(regs::CC)?, 0u32, "CC after {what}");
    let csts = host.wait_csts("CSTS.RDY is 0", |csts| !csts.rdy())?;
    require!(!csts.cfs(), "CSTS.CFS after {what}");
    same!(host.read32(regs::AQA)?, 0u32, "AQA after {what}");
    same!(host.read64(regs::ASQ)?, 0u64, "ASQ after {what}");
    same!(host.read64(regs::ACQ)?, 0u64, "ACQ after {what}");
    Ok(())
}

fn reset_conventional(host: &mut Host) -> Check {
    let ns = host.namespace()?;
    let data = pattern(61, 4 * ns.block as usize);
    host.write(&ns, 500, &data)?;
    host.client.reset()?;
    let command = host.read_config::<2>(4)?;
    same!(
        u32_at(&command, 0) & 6,
        0u32,
        "Memory Space and Bus Master Enable after the reset"
    );
    host.decode()?;
    registers_at_power_on(host, "a reset of the device")?;
    again(host)?;
    host.holds(&ns, 500, &data, "after a reset of the device")
}

fn reset_function_level(host: &mut Host) -> Check {
    let found = super::pci::capabilities(host)?;
    let Some((_, at)) = found.iter().find(|(id, _)| *id == 0x10).copied() else {
        return failed("there is no PCI Express capability");
    };
    let capabilities = u32_at(&host.read_config::<4>(at + 4)?, 0);
    applies_if(
        capabilities >> 28 & 1 != 0,
        "function level reset is not offered",
    )?;
    let ns = host.namespace()?;
    let data = pattern(62, 4 * ns.block as usize);
    host.write(&ns, 510, &data)?;
    let control = host.read_config::<2>(at + 8)?;
    let value = u32_at(&control, 0) as u16 | 0x8000;
    host.write_config(at + 8, &value.to_le_bytes())?;
    std::thread::sleep(std::time::Duration::from_millis(100));
    host.decode()?;
    registers_at_power_on(host, "a function level reset")?;
    again(host)?;
    host.holds(&ns, 510, &data, "after a function level reset")
}

fn reset_controller(host: &mut Host) -> Check {
    let ns = host.namespace()?;
    host.disable()?;
    host.enable()?;
    // Rings doorbells of queues that do not exist any more.
    host.ring(1, false, 1)?;
    host.stays_quiet(0, "the doorbell of a queue that a reset has removed")?;
    let entries = host.io_entries();
    host.create_pair(1, entries)?;
    host.read(&ns, 0, 1)?;
    Ok(())
}

fn reset_controller_with_commands(host: &mut Host) -> Check {
    let ns = host.namespace()?;
    let len = 256u64 << 10;
    let at = host.alloc(len)?;
    let count = host.io_entries() - 1;
    let blocks = len / ns.block;
    for round in 0..5 {
        let read = host.rw_command(NvmOpcode::READ, &ns, 0, blocks, at)?;
        for _ in 0..count {
            host.put_command(1, read)?;
        }
        host.ring_tail(1)?;
        host.disable()?;
        // CSTS.RDY is 0: whatever was in flight is over.
        host.put(at, &vec![0x5a; len as usize])?;
        std::thread::sleep(QUIET_TIME);
        require!(
            host.get(at, len as usize)?.iter().all(|byte| *byte == 0x5a),
            "round {round}: memory was written after CSTS.RDY was 0"
        );
        again(host)?;
        host.stays_quiet(1, "a new queue")?;
        host.read(&ns, 0, 1)?;
    }
    Ok(())
}

fn reset_controller_often(host: &mut Host) -> Check {
    let ns = host.namespace()?;
    for _ in 0..20 {
        host.disable()?;
        again(host)?;
        host.io(nvm(NvmOpcode::FLUSH, ns.nsid))?.succeeds("Flush")?;
    }
    Ok(())
}

const MAGIC: u32 = 0x4e56_4d65;

fn reset_subsystem(host: &mut Host) -> Check {
    applies_if(
        host.cap.nssrs(),
        "CAP.NSSRS is 0: there is no subsystem reset",
    )?;
    let ns = host.namespace()?;
    let data = pattern(63, 4 * ns.block as usize);
    host.write(&ns, 520, &data)?;
    host.write32(regs::NSSR, MAGIC)?;
    host.wait_csts("CSTS.RDY is 0 after a subsystem reset", |csts| !csts.rdy())?;
    require!(
        host.csts()?.nssro(),
        "CSTS.NSSRO is 0 after a subsystem reset"
    );
    same!(
        host.read32(regs::CC)? & 1,
        0u32,
        "CC.EN after a subsystem reset"
    );
    host.write32(regs::CSTS, 0x10)?;
    require!(
        !host.csts()?.nssro(),
        "CSTS.NSSRO is not cleared by writing 1"
    );
    again(host)?;
    host.holds(&ns, 520, &data, "after a subsystem reset")
}

fn nssr_does_nothing(host: &mut Host, value: u32) -> Check {
    host.write32(regs::NSSR, value)?;
    same!(host.read32(regs::NSSR)?, 0u32, "NSSR");
    require!(
        host.csts()?.rdy(),
        "CSTS.RDY is 0 after {value:#x} was written to NSSR"
    );
    require!(!host.csts()?.nssro(), "CSTS.NSSRO is set");
    host.controller()?;
    Ok(())
}

fn reset_subsystem_other_value(host: &mut Host) -> Check {
    applies_if(
        host.cap.nssrs(),
        "CAP.NSSRS is 0: there is no subsystem reset",
    )?;
    for value in [0, 1, MAGIC ^ 1, MAGIC.swap_bytes(), u32::MAX] {
        nssr_does_nothing(host, value)?;
    }
    Ok(())
}

fn reset_subsystem_absent(host: &mut Host) -> Check {
    applies_if(!host.cap.nssrs(), "there is a subsystem reset")?;
    nssr_does_nothing(host, MAGIC)
}

fn reset_keeps_identity(host: &mut Host) -> Check {
    let (controller, nsids) = (host.controller()?.0, host.nsids()?);
    let mut pages = Vec::new();
    for nsid in &nsids {
        pages.push(host.identify(0, *nsid)?);
    }
    host.disable()?;
    host.enable()?;
    require!(
        host.controller()?.0 == controller,
        "Identify Controller differs after a reset"
    );
    require!(
        host.nsids()? == nsids,
        "the active namespaces differ after a reset"
    );
    for (nsid, page) in nsids.iter().zip(pages) {
        // Use may change at any time: bytes 23:16.
        let now = host.identify(0, *nsid)?;
        require!(
            now.get(..16) == page.get(..16) && now.get(24..) == page.get(24..),
            "namespace {nsid} differs after a reset"
        );
    }
    Ok(())
}

fn disconnect_keeps_data(host: &mut Host) -> Check {
    let ns = host.namespace()?;
    let data = pattern(64, 32 * ns.block as usize);
    host.write(&ns, 530, &data)?;
    for _ in 0..3 {
        host.client.reset()?;
        host.decode()?;
        again(host)?;
        host.holds(&ns, 530, &data, "after a reset of the device")?;
    }
    Ok(())
}
