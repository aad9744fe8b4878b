//! What the controller says of placement: Identify, log pages, features, directives.

use crate::common::*;
use crate::placement::host::*;
use controller::{Controller, ControllerConfig, PlacementState};
use nvme::identify::{IdentifyController, IdentifyNamespace, IndependentNamespace};
use nvme::log::{EnduranceGroup, FdpConfiguration, FdpConfigurations, Lid};
use nvme::{AdminOpcode, Status};
use reservations::Reservations;
use std::sync::Arc;
use volume::{Io, IoOptions};
use zerocopy::FromBytes;

const INVALID: Status = Status::INVALID_FIELD;

#[test]
fn identify_reports_placement() {
    let mut p = Placed::new();
    let (_, page) = p.h.identify(1, 0, 0);
    let controller = IdentifyController::read_from_bytes(&page).unwrap();
    assert!(controller.ctratt.fdps() && controller.ctratt.egs());
    assert!(controller.oacs.dirs());
    assert_eq!(controller.endgidmax.get(), 2);
    for (nsid, group) in [(1, 1), (2, 0)] {
        let (_, page) = p.h.identify(0, nsid, 0);
        let ns = IdentifyNamespace::read_from_bytes(&page).unwrap();
        assert_eq!(ns.endgid.get(), group);
        let (_, page) = p.h.identify(8, nsid, 0);
        let ns = IndependentNamespace::read_from_bytes(&page).unwrap();
        assert_eq!(ns.endgid.get(), group);
    }
    for (from, list) in [(0, [1, 0, 1, 0]), (1, [1, 0, 1, 0]), (2, [0; 4])] {
        let (status, page) = p.h.identify(0x19, 0, from);
        assert_eq!(status, Status::SUCCESS);
        assert_eq!(page[..4], list);
    }
    // A controller without them says nothing of all that.
    let mut h = Host::ready();
    let (_, page) = h.identify(1, 0, 0);
    let controller = IdentifyController::read_from_bytes(&page).unwrap();
    assert!(!controller.ctratt.fdps() && !controller.ctratt.egs() && !controller.oacs.dirs());
    assert_eq!(controller.endgidmax.get(), 0);
    assert_eq!(plain(h.identify(0x19, 0, 0).0), INVALID);
    for lid in [0x09, 0x20, 0x21, 0x22, 0x23] {
        let (status, _) = h.log(lid, 64, 0, false);
        assert_eq!(plain(status), Status::INVALID_LOG_PAGE);
    }
}

#[test]
fn placement_log_pages_follow_standard() {
    let mut p = Placed::new();
    let page = p.log(Lid::FDP_CONFIGURATIONS, 1, 0, 512).unwrap();
    let (header, rest) = FdpConfigurations::ref_from_prefix(&page).unwrap();
    let (one, rest) = FdpConfiguration::ref_from_prefix(rest).unwrap();
    // 64 bytes, three handles of 4, and 4 of padding.
    assert_eq!((header.numfdpc_z.get(), header.sze.get()), (0, 96));
    assert_eq!((one.dsze.get(), one.fdpa.into_bits()), (80, 0x80));
    assert_eq!((one.nrg.get(), one.nruh.get()), (1, 3));
    assert_eq!((one.maxpids_z.get(), one.nns.get()), (2, 1));
    assert_eq!((one.runs.get(), one.erutl.get()), (64 * 512, 0));
    assert_eq!(rest[..16], [1, 0, 0, 0, 1, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0]);
    let page = p.log(Lid::RECLAIM_UNIT_HANDLE_USAGE, 1, 0, 64).unwrap();
    assert_eq!(
        (page[0], page[8], page[16], page[24], page[32]),
        (3, 1, 1, 1, 0)
    );
    assert_eq!(p.write(Some(1), 3), Status::SUCCESS);
    let page = p.log(Lid::ENDURANCE_GROUP, 1, 0, 512).unwrap();
    let group = EnduranceGroup::read_from_bytes(&page).unwrap();
    assert_eq!((group.avsp, group.duw.get(), group.muw.get()), (100, 1, 1));
    assert_eq!(group.tegcap.get(), BYTES.into());
    // No controller events.
    let page = p.log(Lid::FDP_EVENTS, 1, 0, 4096).unwrap();
    assert!(page.iter().all(|byte| *byte == 0));
    for lid in [0x09, 0x20, 0x21, 0x22, 0x23] {
        for group in [0, 2, 3, 0xffff] {
            assert_eq!(p.log(Lid(lid), group, 0, 64), Err(INVALID), "{lid} {group}");
        }
    }
}

#[test]
fn placement_mode_is_not_changeable() {
    let mut p = Placed::new();
    let (get, set) = (AdminOpcode::GET_FEATURES, AdminOpcode::SET_FEATURES);
    for sel in 0..3 {
        let done = p.feature(get, 0x1d | sel << 8, 1, 0);
        assert_eq!((done.status(), done.dw0.get()), (Status::SUCCESS, 1));
    }
    assert_eq!(p.feature(get, 0x1d | 3 << 8, 0, 0).dw0.get(), 1);
    for group in [0, 2, 0xffff] {
        assert_eq!(plain(p.feature(get, 0x1d, group, 0).status()), INVALID);
        assert_eq!(plain(p.feature(set, 0x1d, group, 1).status()), INVALID);
    }
    for saved in [0, 1 << 31] {
        let done = p.feature(set, 0x1d | saved, 1, 1);
        assert_eq!(done.status(), Status::SUCCESS);
        for mode in [0, 0x101, 0x100, 3, u32::MAX] {
            let done = p.feature(set, 0x1d | saved, 1, mode);
            assert_eq!(plain(done.status()), Status::COMMAND_SEQUENCE_ERROR);
        }
    }
}

#[test]
fn events_are_selected_per_handle() {
    let mut p = Placed::new();
    let types = [0, 1, 2, 3, 0x80, 0x81];
    let none = types.map(|ty| (ty, 0)).to_vec();
    assert_eq!(p.get_events(1, 0, 0, 255), Ok((6, none.clone())));
    assert_eq!(p.set_events(1, 1, &[3, 0x80], true), Status::SUCCESS);
    let some: Vec<_> = types.map(|ty| (ty, [3, 0x80].contains(&ty).into())).into();
    assert_eq!(p.get_events(1, 1, 0, 0), Ok((6, some.clone())));
    assert_eq!(p.get_events(1, 1, 0, 2), Ok((6, some[..2].to_vec())));
    assert_eq!(p.get_events(1, 1, 1, 0), Ok((6, none.clone())));
    assert_eq!(p.get_events(1, 1, 2, 0), Ok((6, some.clone())));
    assert_eq!(p.get_events(1, 2, 0, 0), Ok((6, none)));
    // None of a list with one that is not supported.
    for bad in [&[0, 4][..], &[0x7f], &[0, 0xff, 1]] {
        assert_eq!(p.set_events(1, 1, bad, true), INVALID);
    }
    assert_eq!(p.set_events(1, 1, &[], true), Status::SUCCESS);
    assert_eq!(p.set_events(1, 1, &[3; 255], true), Status::SUCCESS);
    // A controller-level reset leaves them.
    p.h.disable();
    p.h.until(|h| !h.csts().rdy());
    p.h.enable();
    assert_eq!(p.get_events(1, 1, 0, 0), Ok((6, some)));
    assert_eq!(p.set_events(1, 1, &[3], false), Status::SUCCESS);
    for handle in [3, 0xffff] {
        assert_eq!(p.get_events(1, handle, 0, 0), Err(INVALID));
        assert_eq!(p.set_events(1, handle, &[3], true), INVALID);
    }
    let nowhere = Status::INVALID_NAMESPACE_OR_FORMAT;
    for (nsid, status) in [(2, Status::FDP_DISABLED), (0, nowhere), (u32::MAX, nowhere)] {
        assert_eq!(p.get_events(nsid, 0, 0, 0), Err(status));
        assert_eq!(p.set_events(nsid, 0, &[3], true), status);
    }
}

#[test]
fn directives_are_reported_per_namespace() {
    let mut p = Placed::new();
    assert_eq!(p.directives(1), (5, 5, 4));
    assert_eq!(p.directives(2), (1, 1, 0));
    assert_eq!(p.enable(1, false), Status::SUCCESS);
    assert_eq!(p.directives(1), (5, 1, 4));
    p.h.disable();
    p.h.until(|h| !h.csts().rdy());
    p.h.enable();
    assert_eq!(p.directives(1), (5, 1, 4));
    assert_eq!(p.enable(1, true), Status::SUCCESS);
    assert_eq!(p.directives(1), (5, 5, 4));
    assert_eq!(p.enable(2, true), Status::FDP_DISABLED);
    let nowhere = Status::INVALID_NAMESPACE_OR_FORMAT;
    for (nsid, status) in [(0, nowhere), (u32::MAX, nowhere)] {
        assert_eq!(p.enable(nsid, true), status);
        let receive = AdminOpcode::DIRECTIVE_RECEIVE;
        assert_eq!(p.directive(receive, nsid, 1, 0), status);
    }
    // Other operations, other types, another directive than this one.
    let (send, receive) = (AdminOpcode::DIRECTIVE_SEND, AdminOpcode::DIRECTIVE_RECEIVE);
    for (opcode, cdw11, cdw12) in [
        (receive, 0, 0),
        (receive, 2, 0),
        (receive, 0x101, 0),
        (receive, 0x201, 0),
        (send, 0, 0x201),
        (send, 2, 0x201),
        (send, 0x101, 0x201),
        (send, 0x201, 0x201),
        (send, 1, 1),
        (send, 1, 0x101),
        (send, 1, 0xff01),
    ] {
        let status = p.directive(opcode, 1, cdw11, cdw12);
        assert_eq!(status, INVALID, "{opcode} {cdw11:#x} {cdw12:#x}");
    }
    assert_eq!(p.directives(1), (5, 5, 4));
}

#[test]
fn unsupported_placement_configuration_is_refused() {
    let io = Io::new(IoOptions::default());
    let made = |config, namespace| Controller::new(0, config, vec![namespace], &io);
    let state = || Arc::new(PlacementState::in_memory(GEOMETRY).unwrap());
    let blocks = with_handles(ns(1, mem(BYTES), 4096), state());
    let error = made(ControllerConfig::default(), blocks).err().unwrap();
    assert!(error.to_string().contains("blocks of 512 bytes"), "{error}");
    // Several workers are none of those.
    let workers = ControllerConfig {
        workers: 3,
        ..Default::default()
    };
    let namespace = with_handles(ns(1, mem(BYTES), 512), state());
    assert!(made(workers, namespace).is_ok());
    let subsystem = controller::Subsystem::new();
    subsystem.add_namespace(1, Reservations::default(), None);
    let host = reservations::HostId::extended([1; 16]);
    let shared = ControllerConfig {
        subsystem: Some(controller::InSubsystem { subsystem, host }),
        ..Default::default()
    };
    let namespace = with_handles(ns(1, mem(BYTES), 512), state());
    let error = made(shared, namespace).err().unwrap();
    assert!(error.to_string().contains("placement handles"), "{error}");
}
