//! Records of disks with guests of an earlier process, without that process.

use super::*;
use crate::serve::options::ServeOptions;
use config::spec::{NamespaceSpec, ProcessSpec};
use std::path::Path;
use std::sync::Arc;
use volume::{OpenOptions, open_url};

fn records(state: Option<&Path>, rule: IdentityRule) -> Records {
    let options = ServeOptions {
        state: state.map(Path::to_owned),
        identity: rule,
        ..ServeOptions::new(ProcessSpec::default(), 1)
    };
    Records {
        machine: Some([7; 16]),
        ..Records::open(&options, &KeeperSession::default())
    }
}

fn open(url: &str) -> (NamespaceSpec, Arc<dyn Volume>) {
    let spec = NamespaceSpec {
        volume: config::options::url::parse::<NamespaceSpec>(url)
            .unwrap()
            .volume,
        ..NamespaceSpec::default()
    };
    (spec, open_url(url, OpenOptions::default()).unwrap())
}

fn settle(records: &Records, (spec, volume): &(NamespaceSpec, Arc<dyn Volume>)) -> Result<Shown> {
    records.settle(&OpenDisk {
        name: "a",
        kind: "controller",
        subsystem: None,
        serial: None,
        subnqn: None,
        files: Vec::new(),
        namespaces: vec![Open {
            nsid: 1,
            spec,
            volume: Some(&**volume),
            block_size: None,
        }],
    })
}

fn attached(shown: &Shown) -> Guest {
    let Ids { nguid, eui64, uuid } = shown.ids(1);
    Guest {
        is_attached: true,
        shown: Some(ShownIdentity {
            serial: shown.serial.clone(),
            namespaces: vec![ShownNamespace {
                nsid: 1,
                block_size: 4096,
                nguid,
                eui64,
                uuid,
            }],
        }),
    }
}

fn file(dir: &Path, name: &str) -> String {
    let path = dir.join(name);
    std::fs::write(&path, vec![0; 1 << 16]).unwrap();
    path.to_str().unwrap().to_owned()
}

/// The process before was an older version, or its records are lost.
#[test]
fn guest_keeps_identity_and_block_size_without_a_record() {
    let dir = tempfile::tempdir().unwrap();
    let path = file(dir.path(), "a.raw");
    for url in [&*path, "mem://64K"] {
        let disk = open(url);
        for rule in [IdentityRule::Machine, IdentityRule::Path] {
            let before = settle(&records(None, rule), &disk).unwrap();
            let records = records(None, IdentityRule::Machine);
            records.enter_continued(&DiskSpec::Controller(config::spec::ControllerSpec {
                name: Some("a".to_owned()),
                ..Default::default()
            }));
            records.begin("a", attached(&before));
            let known = records.known("a", 1, &disk.0);
            assert!(known.is_raw && known.was_served);
            assert_eq!(known.block_size, Some(4096));
            let after = settle(&records, &disk).unwrap();
            assert_eq!(after.serial, before.serial, "{url}");
            assert_eq!(after.ids(1), before.ids(1), "{url}, {rule:?}");
        }
    }
}

/// The identity that a guest knows is not given to a volume that cannot be the guest's.
#[test]
fn volume_of_another_path_does_not_get_the_identity_of_the_guests() {
    let dir = tempfile::tempdir().unwrap();
    let (first, second) = (file(dir.path(), "a.raw"), file(dir.path(), "b.raw"));
    let before = settle(&records(None, IdentityRule::Machine), &open(&first)).unwrap();
    let records = records(None, IdentityRule::Machine);
    records.begin("a", attached(&before));
    let after = settle(&records, &open(&second)).unwrap();
    assert_ne!(after.ids(1).nguid, before.ids(1).nguid);
}

#[test]
fn moved_file_keeps_its_identity_and_copied_one_does_not() {
    let dir = tempfile::tempdir().unwrap();
    let state = dir.path().join("state.toml");
    let first = file(dir.path(), "a.raw");
    let records = || records(Some(&state), IdentityRule::Machine);
    let before = settle(&records(), &open(&first)).unwrap();
    let moved = dir.path().join("b.raw");
    std::fs::rename(&first, &moved).unwrap();
    let moved = moved.to_str().unwrap();
    let after = settle(&records(), &open(moved)).unwrap();
    assert_eq!(
        (after.ids(1), &after.serial),
        (before.ids(1), &before.serial)
    );
    let copied = dir.path().join("c.raw");
    std::fs::copy(moved, &copied).unwrap();
    let after = settle(&records(), &open(copied.to_str().unwrap())).unwrap();
    assert_ne!(after.ids(1).nguid, before.ids(1).nguid);
    assert_ne!(after.serial, before.serial);
}

#[test]
fn replaced_file_under_guest_is_refused_until_it_is_accepted() {
    let dir = tempfile::tempdir().unwrap();
    let state = dir.path().join("state.toml");
    let path = file(dir.path(), "a.raw");
    let records = || records(Some(&state), IdentityRule::Machine);
    let before = settle(&records(), &open(&path)).unwrap();
    let other = file(dir.path(), "b.raw");
    std::fs::rename(&other, &path).unwrap();
    let disk = open(&path);
    let records = records();
    records.begin("a", attached(&before));
    assert!(records.accept("a").is_err());
    let error = settle(&records, &disk).err().unwrap().to_string();
    assert!(error.contains("vnvme accept a"), "{error}");
    records.accept("a").unwrap();
    records.begin("a", attached(&before));
    let after = settle(&records, &disk).unwrap();
    assert_eq!(after.ids(1), before.ids(1));
    assert!(records.accept("a").is_err());
}
