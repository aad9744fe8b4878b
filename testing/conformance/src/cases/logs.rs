//! Get Log Page (NVMe Base 2.1, 5.1.12).

use crate::bytes::{first_nonzero, pattern, slice, u8_at, u16_at, u32_at, u64_at, u128_at};
use crate::case::{Need::*, cases};
use crate::host::{Host, PAGE, nvm};
use crate::info::ALL;
use crate::verdict::{Check, Expect, applies_if, failed, require, same};
use nvme::{NvmOpcode, Status};

cases! {
    logs_mandatory, ["1.3-1"], Always, Admin, "Base 2.1, 5.1.12",
        "the error, health and firmware slot logs can be read";
    logs_supported, ["1.3-1"], If("LPA bit 5"), Admin, "Base 2.1, 5.1.12.1.1",
        "the log of supported logs has the mandatory ones, and each that it has can be read";
    logs_vendor_specific, ["1.3-2"], Always, Admin, "Base 2.1, 5.1.12",
        "vendor specific identifiers that are not supported are Invalid Log Page";
    logs_reserved, ["1.3-3"], Always, Admin, "Base 2.1, 5.1.12",
        "reserved identifiers are Invalid Log Page";
    logs_longer_than_mdts, ["1.3-4"], If("MDTS"), Admin, "Base 2.1, 5.1.12, 5.1.13.2.1",
        "a length above MDTS is Invalid Field in Command";
    log_error_after_error, ["1.3-5"], Always, Io, "Base 2.1, 5.1.12.1.2",
        "a failed command is the newest entry of the error log: queue, identifier, status, place";
    log_error_newest_first, [], Always, Io, "Base 2.1, 5.1.12.1.2",
        "entries of the error log are in order, newest first, and as many as ELPE says";
    log_smart_threshold, ["1.3-6"], Always, Admin, "Base 2.1, 5.1.12.1.3",
        "a temperature outside its thresholds sets the critical warning, and one within clears it";
    log_smart_units_read, ["1.3-7"], Always, Io, "Base 2.1, 5.1.12.1.3",
        "data units read and host read commands count reads, and count Compare";
    log_smart_units_written, ["1.3-8"], Always, Io, "Base 2.1, 5.1.12.1.3",
        "data units written and host write commands count writes";
    log_smart_power_cycles, ["1.3-9"], Always, Admin, "Base 2.1, 5.1.12.1.3",
        "a controller reset is no power cycle, and power-on time does not run backwards";
    log_longer_than_page, ["1.3-10"], Always, Admin, "Base 2.1, 5.1.12",
        "a length above the log's own is no error";
    log_telemetry_create, ["1.3-11"], If("LPA bit 3"), Admin, "Base 2.1, 5.1.12.1.8",
        "host-initiated telemetry is captured: its header is right and its areas rise";
    log_telemetry_again, ["1.3-12"], If("LPA bit 3"), Admin, "Base 2.1, 5.1.12.1.8",
        "telemetry that is not captured anew is the same as before, from any block on";
    log_telemetry_offset, ["1.3-13"], If("LPA bit 3"), Admin, "Base 2.1, 5.1.12.1.8",
        "an offset or a length of telemetry that is no multiple of 512 is Invalid Field in Command";
    log_telemetry_controller, ["1.3-14"], If("LPA bit 3"), Admin, "Base 2.1, 5.1.12.1.9",
        "controller-initiated telemetry has a right header";
    log_firmware_slots, ["1.3-a"], Always, Admin, "Base 2.1, 5.1.12.1.4",
        "the active slot is one of those in FRMW, and its revision is that of Identify Controller";
    log_commands_supported, ["1.3-b"], If("LPA bit 1"), Admin, "Base 2.1, 5.1.12.1.6",
        "the log of commands has the mandatory ones, those of OACS and ONCS, and no reserved bit";
    log_features_supported, ["1.3-c"], If("LPA bit 5"), Admin, "Base 2.1, 5.1.12.1",
        "the log of features has those that can be read, and no others";
    log_offset, ["1.3-d"], If("LPA bit 2"), Admin, "Base 2.1, 5.1.12",
        "a part of a log read from an offset on is that part";
    log_offset_invalid, ["1.3-e"], If("LPA bit 2"), Admin, "Base 2.1, 5.1.12",
        "an offset behind the log's end is Invalid Field in Command";
    log_smart_of_namespace, [], If("LPA bit 0 is 0"), Admin, "Base 2.1, 5.1.12.1.3",
        "the health log of one namespace, where there is none, is Invalid Field in Command";
    log_smart_values, [], Always, Admin, "Base 2.1, 5.1.12.1.3",
        "the health log's warnings, percentages and reserved bytes are right";
    log_changed_namespaces, ["1.7-b"], If("OAES bit 8"), Admin, "Base 2.1, 5.1.12.1.5",
        "the list of changed namespaces rises, and is empty after it was read";
    log_persistent_events, ["1.3-f"], If("LPA bit 4"), Admin, "Base 2.1, 5.1.12.1.14",
        "the persistent event log has a right header in its reporting context, and is refused \
         where LPA does not offer it";
    log_ana, ["3.14-d"], If("CMIC bit 3"), Admin, "Base 2.1, 5.1.12.1.13",
        "each active namespace is in one ANA group, with a state";
    log_retains_nothing_else, [], Always, Admin, "Base 2.1, 5.1.12",
        "Get Log Page writes as many bytes as were asked for";
}

fn logs_mandatory(host: &mut Host) -> Check {
    host.log(1, 64)?;
    host.log(2, 512)?;
    host.log(3, 512)?;
    Ok(())
}

/// Returns the entries of the Supported Log Pages log page.
fn supported(host: &mut Host) -> Check<Vec<u32>> {
    applies_if(
        host.controller()?.lpa(5),
        "LPA bit 5 is 0: there is no such log",
    )?;
    let page = host.log(0, 1024)?;
    Ok(page.chunks_exact(4).map(|chunk| u32_at(chunk, 0)).collect())
}

fn logs_supported(host: &mut Host) -> Check {
    let lids = supported(host)?;
    for lid in [0usize, 1, 2, 3, 0x12] {
        let entry = lids.get(lid).copied().unwrap_or(0);
        require!(
            entry & 1 != 0,
            "mandatory log {lid:02x}h is not in the log of supported logs"
        );
    }
    for (lid, entry) in lids.iter().enumerate() {
        // Logs that need a parameter or a context of their own are tried by their own cases.
        let of_group = lid == 0x09 && entry & 1 != 0;
        if matches!(lid, 0x07 | 0x08 | 0x0a | 0x0d | 0x0e | 0x11 | 0x13 | 0x15)
            || (0x20..0x80).contains(&lid)
            || of_group
        {
            continue;
        }
        let nsid = if lid == 0x80 { ALL } else { 0 };
        let (read, _) = host.log_raw(lid as u8, nsid, 512, 0, 0x8000)?;
        let what = format!("Get Log Page {lid:02x}h");
        if entry & 1 != 0 {
            read.succeeds(&what)?;
        } else {
            read.refused(Status::INVALID_LOG_PAGE, &what)?;
        }
    }
    Ok(())
}

fn logs_vendor_specific(host: &mut Host) -> Check {
    let lids = if host.controller()?.lpa(5) {
        supported(host)?
    } else {
        Vec::new()
    };
    for lid in [0xc0usize, 0xd5, 0xff] {
        if lids.get(lid).copied().unwrap_or(0) & 1 == 0 {
            let (entry, _) = host.log_raw(lid as u8, ALL, 512, 0, 0)?;
            entry.refused(
                Status::INVALID_LOG_PAGE,
                &format!("Get Log Page {lid:02x}h"),
            )?;
        }
    }
    Ok(())
}

fn logs_reserved(host: &mut Host) -> Check {
    for lid in [0x1fu8, 0x2f, 0x6f, 0x7f, 0x8f, 0xbe] {
        let (entry, page) = host.log_raw(lid, ALL, 512, 0, 0)?;
        entry.refused(
            Status::INVALID_LOG_PAGE,
            &format!("Get Log Page {lid:02x}h"),
        )?;
        require!(
            page.iter().all(|byte| *byte == 0xa5),
            "log {lid:02x}h was refused, and has written to the buffer"
        );
    }
    Ok(())
}

fn logs_longer_than_mdts(host: &mut Host) -> Check {
    let page = host.page_size;
    let Some(most) = host.controller()?.max_transfer(page) else {
        return crate::verdict::not_applicable("MDTS is zero: there is no limit");
    };
    applies_if(
        most <= 16 << 20,
        "MDTS is above what the case has memory for",
    )?;
    let (entry, _) = host.log_raw(2, ALL, most + page, 0, 0)?;
    entry.refused(
        Status::INVALID_FIELD,
        "a log page one page longer than MDTS",
    )
}

/// Makes a read beyond the end of the namespace fail; returns its identifiers for the error log.
fn fail(host: &mut Host) -> Check<(u16, u32, u64)> {
    let ns = host.namespace()?;
    let at = host.alloc(PAGE)?;
    let command = nvm(NvmOpcode::READ, ns.nsid).prp(at, 0).slba(ns.blocks);
    let cid = host.submit(1, command)?;
    let entry = host.wait_for(1, cid)?;
    entry.expect(Status::LBA_OUT_OF_RANGE, "a read behind the last block")?;
    Ok((cid, ns.nsid, ns.blocks))
}

fn log_error_after_error(host: &mut Host) -> Check {
    let before = u64_at(&host.log(1, 64)?, 0);
    let (cid, nsid, lba) = fail(host)?;
    let entry = host.log(1, 64)?;
    let count = u64_at(&entry, 0);
    require!(
        count > before,
        "the error count is {count}, and was {before} before an error"
    );
    same!(u16_at(&entry, 8), 1u16, "queue of the entry");
    same!(u16_at(&entry, 10), cid, "command identifier of the entry");
    let status = Status::from_bits(u16_at(&entry, 12) >> 1);
    require!(
        status.is(Status::LBA_OUT_OF_RANGE),
        "status of the entry is {status}"
    );
    same!(u64_at(&entry, 16), lba, "LBA of the entry");
    same!(u32_at(&entry, 24), nsid, "namespace of the entry");
    Ok(())
}

fn log_error_newest_first(host: &mut Host) -> Check {
    let entries = host.controller()?.error_entries();
    for _ in 0..3 {
        fail(host)?;
    }
    let log = host.log(1, 64 * entries as u64)?;
    let counts: Vec<u64> = log.chunks_exact(64).map(|entry| u64_at(entry, 0)).collect();
    let used: Vec<u64> = counts
        .iter()
        .copied()
        .take_while(|count| *count != 0)
        .collect();
    require!(
        used.len() >= 3.min(entries),
        "three errors are {} entries",
        used.len()
    );
    require!(
        used.is_sorted_by(|newer, older| newer == &(older + 1)),
        "the error counts are not in order: {used:?}"
    );
    require!(
        first_nonzero(&log, 64 * used.len(), log.len()).is_none(),
        "entries behind the last one are not zero"
    );
    Ok(())
}

fn log_smart_threshold(host: &mut Host) -> Check {
    let now = u32::from(u16_at(&host.log(2, 512)?, 1));
    require!(now > 0, "the composite temperature is zero");
    host.set_feature(0x04, 0, now - 1)?
        .succeeds("a threshold below the temperature")?;
    let warning = u8_at(&host.log(2, 512)?, 0);
    require!(
        warning & 2 != 0,
        "critical warning is {warning:#x} above the over threshold"
    );
    host.set_feature(0x04, 0, now + 50)?
        .succeeds("a threshold above the temperature")?;
    let warning = u8_at(&host.log(2, 512)?, 0);
    same!(
        warning & 2,
        0u8,
        "critical warning bit 1 below the over threshold"
    );
    host.set_feature(0x04, 0, 1 << 20 | (now + 1))?
        .succeeds("an under threshold above it")?;
    let warning = u8_at(&host.log(2, 512)?, 0);
    require!(
        warning & 2 != 0,
        "critical warning is {warning:#x} below the under threshold"
    );
    Ok(())
}

fn log_smart_units_read(host: &mut Host) -> Check {
    let ns = host.namespace()?;
    let before = host.log(2, 512)?;
    // 4000 units of 512 bytes: four of the log's units.
    let blocks = (64 << 10) / ns.block;
    let at = host.alloc(64 << 10)?;
    let command = host.rw_command(NvmOpcode::READ, &ns, 0, blocks, at)?;
    for _ in 0..32 {
        host.io(command)?.succeeds("a read of 64 KiB")?;
    }
    let after = host.log(2, 512)?;
    same!(
        u128_at(&after, 64) - u128_at(&before, 64),
        32u128,
        "host read commands"
    );
    let units = u128_at(&after, 32) - u128_at(&before, 32);
    require!(
        (3..=6).contains(&units),
        "2 MiB were read, which are 4 to 5 units of 512,000 bytes, counted are {units}"
    );
    Ok(())
}

fn log_smart_units_written(host: &mut Host) -> Check {
    let ns = host.namespace()?;
    let before = host.log(2, 512)?;
    let data = pattern(3, 64 << 10);
    let at = host.alloc(64 << 10)?;
    host.put(at, &data)?;
    let command = host.rw_command(NvmOpcode::WRITE, &ns, 0, (64 << 10) / ns.block, at)?;
    for _ in 0..32 {
        host.io(command)?.succeeds("a write of 64 KiB")?;
    }
    let after = host.log(2, 512)?;
    same!(
        u128_at(&after, 80) - u128_at(&before, 80),
        32u128,
        "host write commands"
    );
    let units = u128_at(&after, 48) - u128_at(&before, 48);
    require!(
        (3..=6).contains(&units),
        "2 MiB were written, which are 4 to 5 units of 512,000 bytes, counted are {units}"
    );
    Ok(())
}

fn log_smart_power_cycles(host: &mut Host) -> Check {
    let before = host.log(2, 512)?;
    host.disable()?;
    host.enable()?;
    let after = host.log(2, 512)?;
    same!(
        u128_at(&after, 112),
        u128_at(&before, 112),
        "power cycles over a controller reset"
    );
    require!(
        u128_at(&after, 128) >= u128_at(&before, 128),
        "power-on hours run backwards"
    );
    Ok(())
}

fn log_longer_than_page(host: &mut Host) -> Check {
    let (entry, page) = host.log_raw(2, ALL, 1024, 0, 0)?;
    entry.succeeds("1024 bytes of a log of 512")?;
    let whole = host.log(2, 512)?;
    // Counters of this very command may differ; the beginning has none.
    require!(
        slice(&page, 0, 8) == slice(&whole, 0, 8),
        "the log differs when read longer"
    );
    Ok(())
}

fn telemetry(host: &mut Host) -> Check {
    applies_if(
        host.controller()?.lpa(3),
        "LPA bit 3 is 0: there is no telemetry",
    )
}

/// Checks the header of a telemetry log; returns the number of its last data block.
fn telemetry_header(page: &[u8], lid: u8) -> Check<u64> {
    same!(
        u8_at(page, 0),
        lid,
        "log identifier in the header of telemetry"
    );
    let last = [u16_at(page, 8), u16_at(page, 10), u16_at(page, 12)];
    require!(
        last.is_sorted(),
        "the last blocks of the data areas do not rise: {last:?}"
    );
    if let Some(at) = first_nonzero(page, 1, 5) {
        return failed(format!("reserved byte {at} of telemetry is not zero"));
    }
    Ok(last.into_iter().max().unwrap_or(0).into())
}

fn log_telemetry_create(host: &mut Host) -> Check {
    telemetry(host)?;
    let (entry, page) = host.log_raw(7, ALL, 512, 0, 0x100)?;
    entry.succeeds("telemetry, captured by the host")?;
    let blocks = telemetry_header(&page, 7)?;
    let number = u8_at(&page, 381);
    let (entry, page) = host.log_raw(7, ALL, 512, 0, 0x100)?;
    entry.succeeds("telemetry, captured by the host again")?;
    same!(
        u8_at(&page, 381),
        number.wrapping_add(1),
        "generation number of telemetry that was captured again"
    );
    let (entry, _) = host.log_raw(7, ALL, 512, 512 * blocks, 0)?;
    entry.succeeds("the last block of telemetry")
}

fn log_telemetry_again(host: &mut Host) -> Check {
    telemetry(host)?;
    let (entry, _) = host.log_raw(7, ALL, 512, 0, 0x100)?;
    entry.succeeds("telemetry, captured by the host")?;
    let (_, first) = host.log_raw(7, ALL, 2048, 0, 0)?;
    let (entry, second) = host.log_raw(7, ALL, 2048, 0, 0)?;
    entry.succeeds("telemetry that is not captured anew")?;
    // Bytes 382 and 383 describe the controller's telemetry, which may arrive meanwhile.
    require!(
        slice(&first, 0, 382) == slice(&second, 0, 382)
            && slice(&first, 384, 2048) == slice(&second, 384, 2048),
        "telemetry that is not captured anew has changed"
    );
    if u16_at(&first, 12) >= 3 {
        let (_, part) = host.log_raw(7, ALL, 512, 1024, 0)?;
        require!(
            part == slice(&first, 1024, 1536),
            "block 2 differs when read by itself"
        );
    }
    Ok(())
}

fn log_telemetry_offset(host: &mut Host) -> Check {
    telemetry(host)?;
    let (entry, _) = host.log_raw(7, ALL, 512, 256, 0)?;
    entry.refused(Status::INVALID_FIELD, "telemetry from byte 256 on")?;
    let (entry, _) = host.log_raw(7, ALL, 516, 0, 0)?;
    entry.refused(Status::INVALID_FIELD, "516 bytes of telemetry")
}

fn log_telemetry_controller(host: &mut Host) -> Check {
    telemetry(host)?;
    let (entry, page) = host.log_raw(8, ALL, 512, 0, 0x8000)?;
    entry.succeeds("the controller's telemetry")?;
    telemetry_header(&page, 8)?;
    let available = u8_at(&page, 382);
    require!(
        available <= 1,
        "Controller-Initiated Data Available is {available}"
    );
    Ok(())
}

fn log_firmware_slots(host: &mut Host) -> Check {
    let log = host.log(3, 512)?;
    let controller = host.controller()?.0;
    let slots = u8_at(&controller, 260) >> 1 & 7;
    let active = u8_at(&log, 0) & 7;
    require!(
        (1..=slots).contains(&active),
        "slot {active} is active, and there are {slots}"
    );
    let at = 8 * usize::from(active);
    require!(
        slice(&log, at, at + 8) == slice(&controller, 64, 72),
        "the revision of the active slot is not FR of Identify Controller"
    );
    require!(
        first_nonzero(&log, 64, 512).is_none(),
        "reserved bytes are not zero"
    );
    Ok(())
}

/// Returns the entries of Commands Supported and Effects: admin commands and I/O commands.
pub(super) fn commands(host: &mut Host) -> Check<(Vec<u32>, Vec<u32>)> {
    applies_if(
        host.controller()?.lpa(1),
        "LPA bit 1 is 0: there is no such log",
    )?;
    let log = host.log(5, 4096)?;
    let all: Vec<u32> = log.chunks_exact(4).map(|chunk| u32_at(chunk, 0)).collect();
    let (admin, rest) = all.split_at(all.len().min(256));
    require!(
        rest.iter().skip(256).all(|entry| *entry == 0),
        "reserved bytes of the log of commands are not zero"
    );
    Ok((admin.to_vec(), rest.iter().copied().take(256).collect()))
}

fn log_commands_supported(host: &mut Host) -> Check {
    let (admin, io) = commands(host)?;
    let has = |list: &[u32], opcode: usize| list.get(opcode).copied().unwrap_or(0) & 1 != 0;
    for opcode in [0, 1, 2, 4, 5, 6, 8, 9, 0x0a, 0x0c] {
        require!(
            has(&admin, opcode),
            "mandatory admin command {opcode:02x}h is not in the log"
        );
    }
    for opcode in [0, 1, 2] {
        require!(
            has(&io, opcode),
            "mandatory I/O command {opcode:02x}h is not in the log"
        );
    }
    let controller = host.controller()?;
    let by_oacs = [
        (0, 0x81),
        (0, 0x82),
        (1, 0x80),
        (2, 0x10),
        (2, 0x11),
        (3, 0x0d),
        (3, 0x15),
        (4, 0x14),
        (5, 0x19),
        (5, 0x1a),
        (6, 0x1d),
        (6, 0x1e),
        (7, 0x1c),
        (8, 0x7c),
        (9, 0x86),
        (10, 0x24),
    ];
    for (bit, opcode) in by_oacs {
        require!(
            has(&admin, opcode) == controller.oacs(bit),
            "admin command {opcode:02x}h: OACS bit {bit} is {}, the log says otherwise",
            u8::from(controller.oacs(bit))
        );
    }
    let by_oncs = [
        (0, 5),
        (1, 4),
        (2, 9),
        (3, 8),
        (5, 0x0d),
        (5, 0x0e),
        (5, 0x11),
        (5, 0x15),
        (7, 0x0c),
        (8, 0x19),
    ];
    for (bit, opcode) in by_oncs {
        require!(
            has(&io, opcode) == controller.oncs(bit),
            "I/O command {opcode:02x}h: ONCS bit {bit} is {}, the log says otherwise",
            u8::from(controller.oncs(bit))
        );
    }
    for (opcode, entry) in admin.iter().chain(&io).enumerate() {
        same!(
            entry & 0x0000_3fe0,
            0u32,
            "reserved bits of entry {opcode:#x}"
        );
        require!(
            entry & 1 != 0 || *entry == 0,
            "entry {opcode:#x} of no command is {entry:#x}"
        );
    }
    Ok(())
}

fn log_features_supported(host: &mut Host) -> Check {
    applies_if(
        host.controller()?.lpa(5),
        "LPA bit 5 is 0: there is no such log",
    )?;
    let log = host.log(0x12, 1024)?;
    let nsid = host.nsids()?.first().copied().unwrap_or(1);
    let group = u16_at(&host.identify(0, nsid)?, 102);
    for fid in 0..=0xffu8 {
        let entry = u32_at(&log, 4 * usize::from(fid));
        // Flexible Data Placement is of an Endurance Group.
        let cdw11 = if fid == 0x1d { group.into() } else { 0 };
        let read = host.get_feature(fid, 0, nsid, cdw11)?;
        let what = format!("Get Features {fid:02x}h");
        if entry & 1 == 0 {
            read.refused(Status::INVALID_FIELD, &what)?;
        } else {
            require!(
                !read.status().is(Status::INVALID_FIELD),
                "{what}: Invalid Field in Command, and the log has it"
            );
        }
    }
    Ok(())
}

fn log_offset(host: &mut Host) -> Check {
    applies_if(
        host.controller()?.lpa(2),
        "LPA bit 2 is 0: there is no offset",
    )?;
    let whole = host.log(3, 512)?;
    for (from, len) in [(0u64, 64u64), (4, 60), (8, 8), (64, 448), (508, 4)] {
        let (entry, part) = host.log_raw(3, ALL, len, from, 0)?;
        entry.succeeds(&format!("{len} bytes from byte {from} on"))?;
        require!(
            part == slice(&whole, from as usize, (from + len) as usize),
            "{len} bytes from byte {from} on are not those of the whole log"
        );
    }
    Ok(())
}

fn log_offset_invalid(host: &mut Host) -> Check {
    applies_if(
        host.controller()?.lpa(2),
        "LPA bit 2 is 0: there is no offset",
    )?;
    for offset in [516u64, 4096, 1 << 40] {
        let (entry, _) = host.log_raw(3, ALL, 64, offset, 0)?;
        entry.refused(
            Status::INVALID_FIELD,
            &format!("offset {offset:#x} of a log of 512 bytes"),
        )?;
    }
    Ok(())
}

fn log_smart_of_namespace(host: &mut Host) -> Check {
    applies_if(
        !host.controller()?.lpa(0),
        "LPA bit 0 is 1: namespaces have a health log",
    )?;
    let nsid = host.nsids()?.first().copied().unwrap_or(1);
    let (entry, _) = host.log_raw(2, nsid, 512, 0, 0)?;
    entry.refused(Status::INVALID_FIELD, "the health log of one namespace")?;
    let (entry, _) = host.log_raw(2, 0, 512, 0, 0)?;
    entry.succeeds("the health log of NSID 0")
}

fn log_smart_values(host: &mut Host) -> Check {
    let log = host.log(2, 512)?;
    same!(
        u8_at(&log, 0) & 0xc0,
        0u8,
        "reserved bits of the critical warning"
    );
    require!(
        u8_at(&log, 3) <= 100,
        "available spare is {}%",
        u8_at(&log, 3)
    );
    require!(
        u8_at(&log, 4) <= 100,
        "available spare threshold is {}%",
        u8_at(&log, 4)
    );
    if let Some(at) = first_nonzero(&log, 7, 32).or(first_nonzero(&log, 232, 512)) {
        return failed(format!("reserved byte {at} of the health log is not zero"));
    }
    Ok(())
}

fn log_changed_namespaces(host: &mut Host) -> Check {
    let oaes = u32_at(&host.controller()?.0, 92);
    applies_if(oaes & 0x100 != 0, "OAES bit 8 is 0")?;
    host.log(4, 4096)?;
    let log = host.log(4, 4096)?;
    require!(
        log.iter().all(|byte| *byte == 0),
        "the list is not empty after it was read"
    );
    Ok(())
}

fn log_persistent_events(host: &mut Host) -> Check {
    if !host.controller()?.lpa(4) {
        let (entry, _) = host.log_raw(0x0d, ALL, 512, 0, 0x100)?;
        return entry.refused(
            Status::INVALID_LOG_PAGE,
            "the persistent event log without LPA bit 4",
        );
    }
    // Release a context that was left, then read without one, and with a new one.
    host.log_raw(0x0d, ALL, 512, 0, 0x200)?;
    let (entry, _) = host.log_raw(0x0d, ALL, 512, 0, 0)?;
    entry.expect(
        Status::COMMAND_SEQUENCE_ERROR,
        "the log without a reporting context",
    )?;
    let (entry, page) = host.log_raw(0x0d, ALL, 512, 0, 0x100)?;
    entry.succeeds("establishing a reporting context")?;
    same!(u8_at(&page, 0), 0x0du8, "log identifier of the header");
    let len = u64_at(&page, 8);
    require!(len >= 512, "Total Log Length is {len}");
    let (entry, _) = host.log_raw(0x0d, ALL, 512, 0, 0x200)?;
    entry.succeeds("releasing the reporting context")
}

fn log_retains_nothing_else(host: &mut Host) -> Check {
    let at = host.alloc(2 * PAGE)?;
    host.put(at, &[0xa5; 2 * PAGE as usize])?;
    let command = crate::host::admin(nvme::AdminOpcode::GET_LOG_PAGE, ALL)
        .prp(at, 0)
        .dw(10, 15 << 16 | 2);
    host.admin(command)?
        .succeeds("64 bytes of the health log")?;
    let data = host.get(at, 2 * PAGE as usize)?;
    require!(
        data.iter().skip(64).all(|byte| *byte == 0xa5),
        "bytes behind the 64 that were asked for have changed"
    );
    Ok(())
}

fn log_ana(host: &mut Host) -> Check {
    let controller = host.controller()?;
    applies_if(
        controller.cmic() & 8 != 0,
        "CMIC bit 3 is 0: ANA is not reported",
    )?;
    let log = host.log(0x0c, 4096)?;
    let groups = u16_at(&log, 8);
    require!(groups > 0, "there is no ANA group");
    let most = u32_at(&controller.0, 344);
    let (mut at, mut listed) = (16, Vec::new());
    for _ in 0..groups {
        let (group, count, state) = (u32_at(&log, at), u32_at(&log, at + 4), u8_at(&log, at + 16));
        require!(
            (1..=most).contains(&group),
            "ANA group {group}, ANAGRPMAX is {most}"
        );
        require!(
            matches!(state & 0xf, 1..=4 | 0xf),
            "state {state:#x} of ANA group {group}"
        );
        for n in 0..count as usize {
            let nsid = u32_at(&log, at + 32 + 4 * n);
            same!(
                u32_at(&host.identify(0, nsid)?, 92),
                group,
                "ANAGRPID of namespace {nsid}"
            );
            listed.push(nsid);
        }
        at += 32 + 4 * count as usize;
    }
    listed.sort_unstable();
    let active = host.nsids()?;
    require!(
        listed == active,
        "ANA groups have namespaces {listed:?}, active are {active:?}"
    );
    Ok(())
}
