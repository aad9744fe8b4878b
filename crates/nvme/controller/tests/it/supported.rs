//! What the controller says it supports (Identify Controller, log pages) is what it does: for every
//! opcode, log page and feature.

use crate::common::*;
use controller::{ControllerConfig, PlacementState};
use nvme::feature::Fid;
use nvme::identify::IdentifyController;
use nvme::log::{CommandsSupported, FeaturesSupported, SupportedLogPages};
use nvme::{AdminOpcode, Command, NvmOpcode, Status};
use std::sync::Arc;
use zerocopy::FromBytes;

/// A controller with every feature: one of its volumes has a cache. `placed`: its namespace has
/// placement handles.
fn host(shadow_doorbells: bool, placed: bool) -> Host {
    let config = ControllerConfig {
        shadow_doorbells,
        ..Default::default()
    };
    let (volume, _) = faulty(1 << 20);
    let mut namespace = ns(1, cached(volume), 512);
    let geometry = placement::Geometry {
        handles: 4,
        unit: 64,
        block: 512,
    };
    namespace.placement = placed.then(|| Arc::new(PlacementState::in_memory(geometry).unwrap()));
    let mut h = Host::with(config, vec![namespace]);
    h.enable();
    h.create_pair(1, 16);
    h
}

fn identify(h: &mut Host) -> IdentifyController {
    let (status, page) = h.identify(1, 0, 0);
    assert_eq!(status, Status::SUCCESS);
    IdentifyController::read_from_bytes(&page).unwrap()
}

fn effects(h: &mut Host) -> CommandsSupported {
    let (status, page) = h.log(5, 4096, 0, true);
    assert_eq!(status, Status::SUCCESS);
    CommandsSupported::read_from_bytes(&page).unwrap()
}

/// The bit is set exactly if all of the commands are there; and they are all there, or none is.
fn announced(bit: bool, opcodes: &[u8], known: &[bool; 256]) {
    for &opcode in opcodes {
        assert_eq!(known[usize::from(opcode)], bit, "{opcode:#x}");
    }
}

#[test]
fn every_admin_opcode_matches_effects_log() {
    use AdminOpcode as Op;
    for (shadow_doorbells, placed) in [(true, false), (false, true)] {
        let mut h = host(shadow_doorbells, placed);
        let log = effects(&mut h);
        let mut known = [false; 256];
        for opcode in 0..=0xff {
            // Data pointers that no command takes.
            let mut command = Command::new(opcode, 0, 0);
            command.set_prps(1, 1);
            h.submit(0, command);
            h.run();
            let answer = h.reap(0);
            let invalid = answer.is_some_and(|done| plain(done.status()) == Status::INVALID_OPCODE);
            assert!(answer.is_some() || Op(opcode) == Op::ASYNC_EVENT_REQUEST);
            let says = log.acs[usize::from(opcode)];
            assert_eq!(says.csupp(), !invalid, "{}", Op(opcode));
            assert!(says.csupp() || says == Default::default());
            known[usize::from(opcode)] = !invalid;
        }
        let identify = identify(&mut h);
        let sanitizes = identify.sanicap != Default::default();
        let oacs = identify.oacs;
        for (bit, opcodes) in [
            (oacs.ssrs(), &[Op::SECURITY_SEND, Op::SECURITY_RECEIVE][..]),
            (oacs.fnvms(), &[Op::FORMAT_NVM]),
            (
                oacs.fwds(),
                &[Op::FIRMWARE_COMMIT, Op::FIRMWARE_IMAGE_DOWNLOAD],
            ),
            (
                oacs.nms(),
                &[Op::NAMESPACE_MANAGEMENT, Op::NAMESPACE_ATTACHMENT],
            ),
            (oacs.dsts(), &[Op::DEVICE_SELF_TEST]),
            (sanitizes, &[Op::SANITIZE]),
            (oacs.dirs(), &[Op::DIRECTIVE_SEND, Op::DIRECTIVE_RECEIVE]),
            (oacs.nsrs(), &[Op::NVME_MI_SEND, Op::NVME_MI_RECEIVE]),
            (oacs.vms(), &[Op::VIRTUALIZATION_MANAGEMENT]),
            (oacs.dbcs(), &[Op::DOORBELL_BUFFER_CONFIG]),
            (oacs.glss(), &[Op::GET_LBA_STATUS]),
            (oacs.cfls(), &[Op::LOCKDOWN]),
            (oacs.hmlms(), &[Op::MIGRATION_SEND, Op::MIGRATION_RECEIVE]),
        ] {
            let opcodes: Vec<u8> = opcodes.iter().map(|opcode| opcode.0).collect();
            announced(bit, &opcodes, &known);
        }
        assert_eq!(oacs.dbcs(), shadow_doorbells);
        assert_eq!(oacs.dirs(), placed);
    }
}

#[test]
fn every_io_opcode_matches_effects_log() {
    io_opcodes(false);
    io_opcodes(true);
}

fn io_opcodes(placed: bool) {
    use NvmOpcode as Op;
    let mut h = host(true, placed);
    let log = effects(&mut h);
    let mut known = [false; 256];
    for opcode in 0..=0xff {
        let mut command = Command::new(opcode, 0, 1);
        command.set_prps(DATA, 0);
        let invalid = plain(h.io(command)) == Status::INVALID_OPCODE;
        let says = log.iocs[usize::from(opcode)];
        assert_eq!(says.csupp(), !invalid, "{}", Op(opcode));
        let writes = [
            Op::WRITE,
            Op::WRITE_UNCORRECTABLE,
            Op::WRITE_ZEROES,
            Op::DATASET_MANAGEMENT,
            Op::COPY,
        ];
        assert_eq!(says.lbcc(), writes.contains(&Op(opcode)), "{}", Op(opcode));
        known[usize::from(opcode)] = !invalid;
    }
    announced(true, &[Op::FLUSH.0, Op::READ.0, Op::WRITE.0], &known);
    let of_handles = [Op::IO_MANAGEMENT_SEND.0, Op::IO_MANAGEMENT_RECEIVE.0];
    announced(placed, &of_handles, &known);
    let oncs = identify(&mut h).oncs;
    for (bit, opcodes) in [
        (oncs.nvmcmps(), &[Op::COMPARE][..]),
        (oncs.nvmwusv(), &[Op::WRITE_UNCORRECTABLE]),
        (oncs.nvmdsmsv(), &[Op::DATASET_MANAGEMENT]),
        (oncs.nvmwzsv(), &[Op::WRITE_ZEROES]),
        (
            oncs.reservs(),
            &[
                Op::RESERVATION_REGISTER,
                Op::RESERVATION_REPORT,
                Op::RESERVATION_ACQUIRE,
                Op::RESERVATION_RELEASE,
            ],
        ),
        (oncs.nvmvfys(), &[Op::VERIFY]),
        (oncs.nvmcpys(), &[Op::COPY]),
    ] {
        let opcodes: Vec<u8> = opcodes.iter().map(|opcode| opcode.0).collect();
        announced(bit, &opcodes, &known);
    }
}

#[test]
fn every_log_page_matches_supported_list() {
    log_pages(false);
    log_pages(true);
}

fn log_pages(placed: bool) {
    let mut h = host(true, placed);
    let (_, page) = h.log(0, 1024, 0, true);
    let log = SupportedLogPages::read_from_bytes(&page).unwrap();
    let mut known = [false; 256];
    for lid in 0..=0xff {
        let invalid = plain(h.log(lid, 64, 0, true).0) == Status::INVALID_LOG_PAGE;
        assert_eq!(log.lids[usize::from(lid)].lsupp(), !invalid, "{lid:#x}");
        known[usize::from(lid)] = !invalid;
    }
    // Every controller has these ("NVMe Base 2.1", 3.1.3.5); MLPS stands for 00h, 05h and 12h.
    announced(true, &[1, 2, 3], &known);
    let lpa = identify(&mut h).lpa;
    announced(lpa.cses(), &[5], &known);
    announced(lpa.mlps(), &[0, 5, 0x12], &known);
    announced(lpa.ts(), &[7, 8], &known);
    announced(lpa.pes(), &[0xd], &known);
    announced(placed, &[9, 0x20, 0x21, 0x22, 0x23], &known);
    assert!(lpa.lpeds() && !lpa.smarts() && !lpa.da4s());
}

#[test]
fn every_feature_matches_supported_list() {
    features(false);
    features(true);
}

fn features(placed: bool) {
    let mut h = host(true, placed);
    let (_, page) = h.log(0x12, 1024, 0, true);
    let log = FeaturesSupported::read_from_bytes(&page).unwrap();
    for fid in 0..=0xff {
        // Select 011b: what the feature can be.
        let answer = h.get_feature(Fid(fid), 3, 0);
        let says = log.fids[usize::from(fid)];
        let invalid = plain(answer.status()) == Status::INVALID_FIELD;
        assert_eq!(says.fsupp(), !invalid, "{}", Fid(fid));
        if !invalid {
            let namespace_specific = answer.dw0.get() & 2 != 0;
            let scope = match Fid(fid) {
                // Of an Endurance Group.
                Fid::FLEXIBLE_DATA_PLACEMENT => 8,
                _ if namespace_specific => 1,
                _ => 2,
            };
            assert_eq!(says.fsp(), scope, "{}", Fid(fid));
        }
    }
    let oncs = identify(&mut h).oncs;
    assert_eq!(oncs.tss(), log.fids[usize::from(Fid::TIMESTAMP.0)].fsupp());
    assert!(oncs.ssfs());
    for fid in [Fid::FLEXIBLE_DATA_PLACEMENT, Fid::FDP_EVENTS] {
        assert_eq!(log.fids[usize::from(fid.0)].fsupp(), placed);
    }
    // No other feature is saveable.
    let answer = h.get_feature(Fid::ARBITRATION, 3, 0);
    assert_eq!(answer.dw0.get() & 1, 0);
}
