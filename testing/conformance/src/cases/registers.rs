//! Controller properties (NVMe Base 2.1, 3.1.4; NVMe over PCIe Transport 1.1, 3.1).

use crate::bytes::{u8_at, u32_at};
use crate::case::{Need::*, cases};
use crate::host::{ENTRIES, Enable, Host, PAGE};
use crate::verdict::{Check, Expect, applies_if, require, same};
use nvme::regs::{self, Ams, Cap, Cc, CcCss, Shn, Shst};
use std::time::Instant;

cases! {
    cap_page_sizes, ["4.1", "4.2"], Always, Disabled, "Base 2.1, 3.1.4.1",
        "the largest memory page is not smaller than the smallest";
    cap_command_sets, ["4.3"], Always, Disabled, "Base 2.1, 3.1.4.1",
        "CAP.CSS has a command set, and no bit that is reserved";
    cap_doorbell_stride, ["4.4"], Always, Admin, "Base 2.1, 3.1.4.1; PCIe Transport 1.1, 3.1.2",
        "doorbells are where CAP.DSTRD says";
    cap_timeout, ["4.5"], Always, Disabled, "Base 2.1, 3.1.4.1",
        "CSTS.RDY follows CC.EN within CAP.TO, in both directions";
    cap_arbitration, ["4.6"], Always, Disabled, "Base 2.1, 3.1.4.1, 3.1.4.5",
        "each arbitration mechanism that CAP.AMS names can be selected";
    cap_queue_entries, ["4.8"], Always, Disabled, "Base 2.1, 3.1.4.1",
        "queues of two entries at least are possible";
    cap_reserved_bits, ["4-a"], Always, Disabled, "Base 2.1, 3.1.4.1",
        "reserved bits of CAP are zero";
    cc_entry_sizes, ["4-b"], Always, Disabled, "Base 2.1, 3.1.4.5",
        "CC.IOSQES and CC.IOCQES keep what is written, and are zero after a reset of the device";
    cc_entry_sizes_match_identify, ["4-b"], Always, Admin, "Base 2.1, 5.1.13.2.1",
        "entries of 64 and 16 bytes are within SQES and CQES";
    cc_command_set, ["4-c"], Always, Disabled, "Base 2.1, 3.1.4.5",
        "each command set selection that CAP.CSS names enables the controller";
    cc_memory_page_size, ["4-d"], Always, Disabled, "Base 2.1, 3.1.4.5",
        "the controller works with each memory page size that CAP names";
    cc_shutdown_normal, ["4.12"], Always, Admin, "Base 2.1, 3.6.1",
        "CSTS.SHST tells of a normal shutdown, at last that it is complete";
    cc_shutdown_abrupt, ["4.12"], Always, Admin, "Base 2.1, 3.6.1",
        "CSTS.SHST tells of an abrupt shutdown, at last that it is complete";
    cc_shutdown_while_disabled, [], Always, Disabled, "Base 2.1, 3.6.1",
        "a shutdown of the disabled controller completes as well";
    cc_shutdown_ends_with_reset, ["4-e"], Always, Io, "Base 2.1, 3.6.1",
        "after a shutdown, a reset makes the controller usable, and data are there";
    cc_enable, ["4.15"], Always, Admin, "Base 2.1, 3.1.4.5, 3.5.1",
        "CC.EN to 0 resets: CSTS.RDY is 0, AQA, ASQ and ACQ stay; to 1 it is ready again";
    csts_no_fatal_status, ["4.17"], Always, Admin, "Base 2.1, 3.1.4.6",
        "CSTS.CFS is 0 when enabled, and stays so over commands that are wrong";
    csts_reserved_bits, ["4-f"], Always, Admin, "Base 2.1, 3.1.4.6",
        "reserved bits of CSTS are zero";
    version_register, ["4.18"], Always, Admin, "Base 2.1, 3.1.4.2",
        "VS is a version of the standard, and that of Identify Controller";
    read_only_registers, [], Always, Disabled, "Base 2.1, 3.1.4",
        "CAP, VS and CSTS do not change by writes";
    reserved_registers, ["4-g"], Always, Disabled, "Base 2.1, 3.1.4",
        "reserved registers read as zero, whatever is written";
    admin_queue_registers, ["4-h"], Always, Disabled, "Base 2.1, 3.1.4.8 to 3.1.4.10",
        "AQA, ASQ and ACQ keep what is written, without their reserved bits";
    register_halves, [], Always, Disabled, "PCIe Transport 1.1, 3.1",
        "registers of 64 bits are the same by one access and by two";
    admin_queues_smallest, ["4-i"], Always, Disabled, "Base 2.1, 3.1.4.8",
        "admin queues of two entries work";
    admin_queues_largest, ["4-i"], Always, Disabled, "Base 2.1, 3.1.4.8",
        "admin queues of 4096 entries work";
    controller_ready_timeouts, ["4.20"], If("CAP.CRMS"), Disabled, "Base 2.1, 3.1.4.21",
        "CRTO has the time-outs of the modes that CAP.CRMS names";
    interrupt_mask_registers, ["4-j"], Always, Disabled, "Base 2.1, 3.1.4.3, 3.1.4.4",
        "while MSI-X is off, INTMS sets and INTMC clears bits of the mask, and both read as it";
    no_memory_buffer, ["4-k"], If("CAP.CMBS is 0"), Disabled, "Base 2.1, 3.1.4.11, 3.1.4.12",
        "without a controller memory buffer its registers are zero";
    no_persistent_memory_region, ["4-l"], If("CAP.PMRS is 0"), Disabled, "Base 2.1, 3.1.4.22",
        "without a persistent memory region its registers are zero";
    no_boot_partition, ["11.1-a"], If("CAP.BPS is 0"), Disabled, "Base 2.1, 3.1.4.13",
        "without boot partitions their registers are zero";
}

fn cap_page_sizes(host: &mut Host) -> Check {
    let (min, max) = (host.cap.mpsmin(), host.cap.mpsmax());
    require!(max >= min, "MPSMAX is {max}, MPSMIN {min}");
    Ok(())
}

fn cap_command_sets(host: &mut Host) -> Check {
    let css = host.cap.into_bits() >> 37 & 0xff;
    require!(css != 0, "CAP.CSS is zero");
    same!(css & 0x3e, 0u64, "reserved bits 5:1 of CAP.CSS");
    require!(
        css & 1 != 0 || css & 0x40 != 0 || css & 0x80 != 0,
        "CAP.CSS names no command set: {css:#x}"
    );
    let none = css & 0x80 != 0;
    require!(
        !none || css & 0x41 == 0,
        "CAP.CSS says that there is none and one: {css:#x}"
    );
    Ok(())
}

fn cap_doorbell_stride(host: &mut Host) -> Check {
    // The head doorbell of queue 0 is the first that the stride moves: if it were elsewhere, the
    // completion queue would be full after its entries.
    for _ in 0..2 * ENTRIES {
        host.controller()?;
    }
    Ok(())
}

fn cap_timeout(host: &mut Host) -> Check {
    require!(host.cap.to() != 0, "CAP.TO is zero");
    for _ in 0..3 {
        let begin = Instant::now();
        host.enable()?;
        let ready = begin.elapsed();
        require!(ready <= host.ready_time(), "ready after {ready:?}");
        host.disable()?;
    }
    Ok(())
}

fn cap_arbitration(host: &mut Host) -> Check {
    let ams = host.cap.ams();
    let mut all = vec![Ams::ROUND_ROBIN];
    if ams & 1 != 0 {
        all.push(Ams::WEIGHTED_ROUND_ROBIN);
    }
    if ams & 2 != 0 {
        all.push(Ams::VENDOR_SPECIFIC);
    }
    for mechanism in all {
        let mut how = Enable::default();
        how.cc = how.cc.with_ams(mechanism);
        host.enable_with(how)?;
        let cc = Cc::from_bits(host.read32(regs::CC)?);
        same!(cc.ams().0, mechanism.0, "CC.AMS");
        host.controller()?;
        host.disable()?;
    }
    Ok(())
}

fn cap_queue_entries(host: &mut Host) -> Check {
    require!(host.cap.mqes_z() >= 1, "CAP.MQES is {}", host.cap.mqes_z());
    Ok(())
}

fn cap_reserved_bits(host: &mut Host) -> Check {
    let defined = Cap::from_bits(host.cap.into_bits());
    let reserved = 0x1fu64 << 19 | 3u64 << 62;
    same!(defined.into_bits() & reserved, 0u64, "reserved bits of CAP");
    Ok(())
}

fn cc_entry_sizes(host: &mut Host) -> Check {
    let cc = Cc::new().with_iosqes(6).with_iocqes(4);
    host.write32(regs::CC, cc.into_bits())?;
    let found = Cc::from_bits(host.read32(regs::CC)?);
    same!(found.iosqes(), 6u8, "CC.IOSQES");
    same!(found.iocqes(), 4u8, "CC.IOCQES");
    host.client.reset()?;
    host.decode()?;
    same!(
        host.read32(regs::CC)?,
        0u32,
        "CC after a reset of the device"
    );
    Ok(())
}

fn cc_entry_sizes_match_identify(host: &mut Host) -> Check {
    let page = host.controller()?.0;
    for (at, size, what) in [(512, 6, "SQES"), (513, 4, "CQES")] {
        let field = u8_at(&page, at);
        let (least, most) = (field & 0xf, field >> 4);
        same!(
            least,
            size as u8,
            "smallest entry of {what}, which is required"
        );
        require!(most >= least, "largest entry of {what}: {field:#x}");
    }
    Ok(())
}

fn cc_command_set(host: &mut Host) -> Check {
    let css = host.cap.css();
    let mut all = Vec::new();
    if css.ncss() {
        all.push(CcCss::NVM);
    }
    if css.iocss() {
        all.push(CcCss::ALL_SUPPORTED);
    }
    if css.noiocss() {
        all.push(CcCss::ADMIN_ONLY);
    }
    for set in all {
        let mut how = Enable::default();
        how.cc = how.cc.with_css(set);
        host.enable_with(how)?;
        host.controller()?;
        host.disable()?;
    }
    Ok(())
}

fn cc_memory_page_size(host: &mut Host) -> Check {
    for mps in host.cap.mpsmin()..=host.cap.mpsmax().min(4) {
        let mut how = Enable::default();
        how.cc = how.cc.with_mps(mps);
        host.enable_with(how)?;
        let entries = host.io_entries();
        host.create_pair(1, entries)?;
        let ns = host.namespace()?;
        // Two pages and a part of a third one: a list, by the page size in use.
        let blocks = (2 * host.page_size + PAGE).div_ceil(ns.block);
        let data = crate::bytes::pattern(mps.into(), (blocks * ns.block) as usize);
        host.write(&ns, 64, &data)?;
        host.holds(
            &ns,
            64,
            &data,
            &format!("with pages of {} bytes", host.page_size),
        )?;
        host.disable()?;
    }
    Ok(())
}

fn shut_down(host: &mut Host, how: Shn) -> Check {
    let cc = Cc::from_bits(host.read32(regs::CC)?);
    host.write32(regs::CC, cc.with_shn(how).into_bits())?;
    host.wait_csts("CSTS.SHST 10b", |csts| csts.shst() == Shst::COMPLETE)?;
    Ok(())
}

fn cc_shutdown_normal(host: &mut Host) -> Check {
    same!(host.csts()?.shst().0, 0u8, "CSTS.SHST before");
    shut_down(host, Shn::NORMAL)
}

fn cc_shutdown_abrupt(host: &mut Host) -> Check {
    same!(host.csts()?.shst().0, 0u8, "CSTS.SHST before");
    shut_down(host, Shn::ABRUPT)
}

fn cc_shutdown_while_disabled(host: &mut Host) -> Check {
    shut_down(host, Shn::NORMAL)?;
    host.enable()?;
    same!(
        host.csts()?.shst().0,
        0u8,
        "CSTS.SHST after the controller was enabled"
    );
    host.controller()?;
    Ok(())
}

fn cc_shutdown_ends_with_reset(host: &mut Host) -> Check {
    let ns = host.namespace()?;
    let data = crate::bytes::pattern(11, 8 * ns.block as usize);
    host.write(&ns, 32, &data)?;
    shut_down(host, Shn::NORMAL)?;
    host.disable()?;
    same!(host.csts()?.shst().0, 0u8, "CSTS.SHST after the reset");
    host.enable()?;
    let entries = host.io_entries();
    host.create_pair(1, entries)?;
    host.holds(&ns, 32, &data, "after a shutdown")
}

fn cc_enable(host: &mut Host) -> Check {
    let before = [
        host.read64(regs::ASQ)?,
        host.read64(regs::ACQ)?,
        host.read32(regs::AQA)?.into(),
    ];
    host.disable()?;
    let after = [
        host.read64(regs::ASQ)?,
        host.read64(regs::ACQ)?,
        host.read32(regs::AQA)?.into(),
    ];
    for (name, (before, after)) in ["ASQ", "ACQ", "AQA"].iter().zip(before.iter().zip(after)) {
        same!(after, *before, "{name} after a controller reset");
    }
    host.enable()?;
    host.controller()?;
    Ok(())
}

fn csts_no_fatal_status(host: &mut Host) -> Check {
    require!(!host.csts()?.cfs(), "CSTS.CFS is set");
    for opcode in [0x7b, 0xbf, 0xff] {
        let entry = host.admin(test_host::Command::new(opcode, 0))?;
        entry.fails(&format!("opcode {opcode:#x}"))?;
    }
    require!(
        !host.csts()?.cfs(),
        "CSTS.CFS is set by a command that is wrong"
    );
    Ok(())
}

fn csts_reserved_bits(host: &mut Host) -> Check {
    same!(host.read32(regs::CSTS)? >> 7, 0u32, "bits 31:7 of CSTS");
    Ok(())
}

fn version_register(host: &mut Host) -> Check {
    let vs = host.read32(regs::VS)?;
    let known = [
        0x1_0000, 0x1_0100, 0x1_0200, 0x1_0201, 0x1_0300, 0x1_0400, 0x2_0000, 0x2_0100, 0x2_0200,
        0x2_0300,
    ];
    require!(
        known.contains(&vs),
        "VS is {vs:#x}, which is no version of the standard"
    );
    let controller = host.controller()?;
    same!(controller.ver(), vs, "VER of Identify Controller");
    Ok(())
}

fn read_only_registers(host: &mut Host) -> Check {
    for at in [regs::CAP, regs::CAP + 4, regs::VS, regs::CSTS] {
        let before = host.read32(at)?;
        // Not NSSRO, which is cleared by writing 1.
        host.write32(at, !before & !0x10)?;
        same!(host.read32(at)?, before, "register {at:#x} after a write");
    }
    Ok(())
}

fn reserved_registers(host: &mut Host) -> Check {
    for at in [0x18u64].into_iter().chain((0x6c..0xe00).step_by(4)) {
        if at == 0x18 || at.is_multiple_of(0x40) {
            host.write32(at, u32::MAX)?;
        }
        same!(host.read32(at)?, 0u32, "reserved register {at:#x}");
    }
    Ok(())
}

fn admin_queue_registers(host: &mut Host) -> Check {
    host.write32(regs::AQA, 0xffff_ffff)?;
    same!(
        host.read32(regs::AQA)?,
        0x0fff_0fffu32,
        "AQA after all ones"
    );
    for at in [regs::ASQ, regs::ACQ] {
        host.write64(at, 0x1234_5678_9abc_dfff)?;
        same!(
            host.read64(at)?,
            0x1234_5678_9abc_d000u64,
            "register {at:#x}, bits 11:0 reserved"
        );
    }
    Ok(())
}

fn register_halves(host: &mut Host) -> Check {
    host.write32(regs::ASQ, 0x0765_4000)?;
    host.write32(regs::ASQ + 4, 0x89)?;
    same!(
        host.read64(regs::ASQ)?,
        0x89_0765_4000u64,
        "ASQ after two writes of 32 bits"
    );
    let cap = u64::from(host.read32(regs::CAP + 4)?) << 32 | u64::from(host.read32(regs::CAP)?);
    same!(cap, host.read64(regs::CAP)?, "CAP by two reads of 32 bits");
    Ok(())
}

fn admin_queues_smallest(host: &mut Host) -> Check {
    let how = Enable {
        asq: 2,
        acq: 2,
        ..Enable::default()
    };
    host.enable_with(how)?;
    for _ in 0..9 {
        host.controller()?;
    }
    Ok(())
}

fn admin_queues_largest(host: &mut Host) -> Check {
    let how = Enable {
        asq: 4096,
        acq: 4096,
        ..Enable::default()
    };
    host.enable_with(how)?;
    let at = host.alloc(PAGE)?;
    use crate::host::admin;
    let command = admin(nvme::AdminOpcode::IDENTIFY, 0).prp(at, 0).dw(10, 1);
    // All of the queue at once, and across its end.
    for round in [4095, 600] {
        for _ in 0..round {
            host.put_command(0, command)?;
        }
        host.ring_tail(0)?;
        for _ in 0..round {
            host.next(0)?.succeeds("Identify in a full admin queue")?;
        }
    }
    Ok(())
}

fn controller_ready_timeouts(host: &mut Host) -> Check {
    let vs = host.read32(regs::VS)?;
    let crms = host.cap.into_bits() >> 59 & 3;
    require!(
        vs < 0x2_0000 || crms & 1 != 0,
        "CAP.CRMS bit 0 is 0, from version 2.0 on it is 1"
    );
    applies_if(crms != 0, "CAP.CRMS is zero")?;
    let crto = host.read32(regs::CRTO)?;
    require!(crto & 0xffff != 0, "CRTO.CRWMT is zero");
    require!(
        crms & 2 == 0 || crto >> 16 != 0,
        "CRTO.CRIMT is zero, and CAP.CRMS bit 1 is set"
    );
    // CAP.TO is the smaller of 255 and CRWMT, if CRIMS is 0; never larger than allowed.
    let to = u32::from(host.cap.to());
    require!(
        crms & 2 != 0 || to == (crto & 0xffff).min(255),
        "CAP.TO is {to}, CRTO.CRWMT {}",
        crto & 0xffff
    );
    Ok(())
}

fn interrupt_mask_registers(host: &mut Host) -> Check {
    host.write32(regs::INTMC, u32::MAX)?;
    same!(
        host.read32(regs::INTMS)?,
        0u32,
        "INTMS after all bits were cleared"
    );
    host.write32(regs::INTMS, 1)?;
    same!(
        host.read32(regs::INTMS)? & 1,
        1u32,
        "INTMS bit 0 after it was set"
    );
    same!(
        host.read32(regs::INTMC)? & 1,
        1u32,
        "INTMC bit 0 after it was set"
    );
    host.write32(regs::INTMS, 0)?;
    same!(
        host.read32(regs::INTMS)? & 1,
        1u32,
        "INTMS bit 0 after zero was written"
    );
    host.write32(regs::INTMC, 1)?;
    same!(
        host.read32(regs::INTMS)? & 1,
        0u32,
        "INTMS bit 0 after it was cleared"
    );
    Ok(())
}

fn zero(host: &mut Host, from: u64, to: u64) -> Check {
    for at in (from..to).step_by(4) {
        same!(
            host.read32(at)?,
            0u32,
            "register {at:#x} of what is not there"
        );
    }
    Ok(())
}

fn no_memory_buffer(host: &mut Host) -> Check {
    applies_if(!host.cap.cmbs(), "there is a controller memory buffer")?;
    zero(host, regs::CMBLOC, regs::BPINFO)?;
    zero(host, regs::CMBMSC, regs::NSSD)
}

fn no_persistent_memory_region(host: &mut Host) -> Check {
    applies_if(!host.cap.pmrs(), "there is a persistent memory region")?;
    zero(host, regs::PMRCAP, regs::PMRMSCU + 4)
}

fn no_boot_partition(host: &mut Host) -> Check {
    applies_if(!host.cap.bps(), "there are boot partitions")?;
    let mut info = [0; 16];
    host.read_bar(regs::BPINFO, &mut info)?;
    for at in (0..16).step_by(4) {
        same!(u32_at(&info, at), 0u32, "boot partition register {at:#x}");
    }
    Ok(())
}
