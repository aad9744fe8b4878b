//! Reservations file: a saved state is found again, whatever happens in between.

use nvme::Status;
use reservations::{
    Executed, FileError, HostId, Notification, NumberedNotice, Operation, ReservationFile,
    Reservations, StoredReservations,
};
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::time::Duration;

const NAMESPACE: [u8; 16] = [7; 16];
const BOOT: [u8; 16] = [1; 16];
const OTHER_BOOT: [u8; 16] = [2; 16];
const SLOT: usize = 16 << 10;

type Opened = (ReservationFile, Reservations);

fn open(path: &Path, boot: [u8; 16]) -> Result<Opened, FileError> {
    let opened = ReservationFile::open(path, NAMESPACE, boot, Duration::ZERO);
    opened.map(|(file, stored)| (file, stored.state))
}

fn register(state: &mut Reservations, host: u64, ptpl: bool) {
    let register = Operation::Register {
        key: host,
        ptpl: Some(ptpl),
    };
    state.execute(&HostId::short(host), &register).unwrap();
}

fn hosts(state: &Reservations) -> Vec<u64> {
    let registrants = state.registrants().iter();
    registrants
        .map(|registrant| registrant.host.low())
        .collect()
}

#[test]
fn state_survives_process_and_with_ptpl_power_loss() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("disk.reservations");
    let open = |boot| ReservationFile::open(&path, NAMESPACE, boot, Duration::ZERO).unwrap();
    let (mut file, mut stored) = open(BOOT);
    assert_eq!(stored, Reservations::new(true).into());
    assert_eq!(
        fs::metadata(&path).unwrap().permissions().mode() & 0o777,
        0o600
    );
    assert!(!dir.path().join("disk.reservations.new").exists());
    let last = Executed {
        token: [9; 16],
        status: Status::SUCCESS,
    };
    for (host, ptpl) in [(1, false), (2, true)] {
        register(&mut stored.state, host, ptpl);
        stored.executed.push(last);
        stored.notices.push(NumberedNotice {
            number: host,
            host: HostId::extended([3; 16]),
            notification: Notification::ReservationReleased,
        });
        file.save(&stored).unwrap();
        drop(file);
        // A process after this one.
        let (next, found) = open(BOOT);
        assert_eq!(found, stored);
        drop(next);
        // The host was switched off in between.
        let (next, found) = open(OTHER_BOOT);
        assert_eq!(hosts(&found.state), if ptpl { vec![1, 2] } else { vec![] });
        assert!(found.state.can_persist());
        assert!(found.executed.is_empty() && found.notices.is_empty());
        drop(next);
        file = open(BOOT).0;
    }
}

#[test]
fn memory_keeps_state_for_next_process_without_ptpl() {
    let file = tempfile::tempfile().unwrap();
    let name = Path::new("memory");
    let copy = || file.try_clone().unwrap();
    assert!(ReservationFile::open_memory(copy(), name, NAMESPACE).is_err());
    let mut memory = ReservationFile::new_memory(copy(), name, NAMESPACE).unwrap();
    let mut stored = StoredReservations::from(Reservations::new(false));
    for key in 1..4 {
        let operation = Operation::Register { key, ptpl: None };
        let done = stored.state.execute(&HostId::short(key), &operation);
        done.unwrap();
        memory.save(&stored).unwrap();
        // The process ends here.
        let (next, found) = ReservationFile::open_memory(copy(), name, NAMESPACE).unwrap();
        assert_eq!(found, stored);
        assert!(!found.state.can_persist());
        memory = next;
    }
    let other = ReservationFile::open_memory(copy(), name, [8; 16]);
    assert!(matches!(other, Err(FileError::OtherNamespace { .. })));
}

#[test]
fn torn_write_leaves_old_or_new_state() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("file");
    let (mut file, mut state) = open(&path, BOOT).unwrap();
    for host in 1..6 {
        let before = fs::read(&path).unwrap();
        let old = hosts(&state);
        register(&mut state, host, true);
        file.save(&state.clone().into()).unwrap();
        let new = hosts(&state);
        let after = fs::read(&path).unwrap();
        let changed: Vec<usize> = (0..before.len())
            .filter(|i| before[*i] != after[*i])
            .collect();
        let (first, last) = (changed[0], changed[changed.len() - 1]);
        assert_eq!(first / SLOT, last / SLOT, "one place is written at a time");
        let mut found_new = 0;
        for cut in first..=last + 1 {
            // The disk may have written either end of it.
            for front in [true, false] {
                let mut torn = before.clone();
                if front {
                    torn[..cut].copy_from_slice(&after[..cut])
                } else {
                    torn[cut..].copy_from_slice(&after[cut..])
                }
                let copy = dir.path().join("torn");
                fs::write(&copy, &torn).unwrap();
                let (_file, found) = open(&copy, BOOT).unwrap();
                let found = hosts(&found);
                assert!(found == old || found == new, "{cut} {front}: {found:?}");
                found_new += u32::from(found == new);
            }
        }
        assert!(found_new >= 2, "{found_new}");
    }
}

#[test]
fn file_is_locked_by_one_process() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("file");
    let (file, ..) = open(&path, BOOT).unwrap();
    let error = open(&path, BOOT).unwrap_err().to_string();
    assert!(
        error.contains("file: another process uses this reservation file"),
        "{error}"
    );
    // The next process waits.
    let waiting = std::thread::spawn({
        let path = path.clone();
        move || ReservationFile::open(&path, NAMESPACE, BOOT, Duration::from_secs(60)).map(|_| ())
    });
    std::thread::sleep(Duration::from_millis(50));
    assert!(!waiting.is_finished());
    drop(file);
    waiting.join().unwrap().unwrap();
}

#[test]
fn concurrent_creation_yields_one_file() {
    let dir = tempfile::tempdir().unwrap();
    for round in 0..20 {
        let path = dir.path().join(format!("file{round}"));
        std::thread::scope(|scope| {
            for host in 1..=4 {
                let path = &path;
                scope.spawn(move || {
                    let limit = Duration::from_secs(60);
                    let (mut file, mut stored) =
                        ReservationFile::open(path, NAMESPACE, BOOT, limit).unwrap();
                    register(&mut stored.state, host, true);
                    file.save(&stored).unwrap();
                });
            }
        });
        let (_file, state) = open(&path, BOOT).unwrap();
        let mut hosts = hosts(&state);
        hosts.sort_unstable();
        assert_eq!(hosts, [1, 2, 3, 4]);
    }
}

#[test]
fn foreign_file_is_refused_and_left_alone() {
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name);
    let refused = |name: &str, why: &str| {
        let before = fs::read(path(name)).ok();
        let error = open(&path(name), BOOT).unwrap_err().to_string();
        assert!(error.contains(why) && error.contains(name), "{error}");
        assert_eq!(fs::read(path(name)).ok(), before);
    };
    fs::create_dir(path("folder")).unwrap();
    refused("folder", "not a regular file");
    rustix::fs::mknodat(
        rustix::fs::CWD,
        path("fifo"),
        rustix::fs::FileType::Fifo,
        rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR,
        0,
    )
    .unwrap();
    refused_fifo(&path("fifo"));
    fs::write(path("empty"), "").unwrap();
    refused("empty", "it has 0 bytes instead of 32768");
    fs::write(path("disk"), vec![0; 1 << 20]).unwrap();
    refused("disk", "it has 1048576 bytes");
    fs::write(path("zeroes"), vec![0; 2 * SLOT]).unwrap();
    refused("zeroes", "nothing was written; nothing was written");
    fs::write(path("noise"), vec![0xa5; 2 * SLOT]).unwrap();
    refused("noise", "not a reservation state");
    fs::create_dir(path("no")).unwrap();
    let error = open(&path("no/such/file"), BOOT).unwrap_err().to_string();
    assert!(error.contains("No such file"), "{error}");

    let (mut file, mut state) = open(&path("other"), BOOT).unwrap();
    register(&mut state, 1, true);
    file.save(&state.clone().into()).unwrap();
    drop(file);
    let other = ReservationFile::open(&path("other"), [8; 16], BOOT, Duration::ZERO);
    let error = other.unwrap_err().to_string();
    let why = "another namespace (NGUID 07070707070707070707070707070707)";
    assert!(error.contains(why), "{error}");
}

/// Checks that opening a FIFO is refused without waiting for a reader.
fn refused_fifo(path: &Path) {
    let error = open(path, BOOT).unwrap_err().to_string();
    assert!(error.contains("not a regular file"), "{error}");
}

/// Checks that a program that cannot read the newest state does not fall back to the older state in
/// the other slot.
#[test]
fn older_program_refuses_newer_state() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("file");
    let (mut file, mut state) = open(&path, BOOT).unwrap();
    register(&mut state, 1, true);
    file.save(&state.clone().into()).unwrap();
    drop(file);
    let good = fs::read(&path).unwrap();
    for place in 0..2 {
        let mut bytes = good.clone();
        let image = &mut bytes[place * SLOT..(place + 1) * SLOT];
        if image.iter().all(|byte| *byte == 0) {
            image.copy_from_slice(&good[(1 - place) * SLOT..(2 - place) * SLOT]);
        }
        image[8] = 3;
        let length = u32::from_le_bytes(image[12..16].try_into().unwrap()) as usize;
        let crc = crc32fast::hash(&image[..length - 4]);
        image[length - 4..length].copy_from_slice(&crc.to_le_bytes());
        fs::write(&path, bytes).unwrap();
        let error = open(&path, BOOT).unwrap_err().to_string();
        assert!(error.contains("version 3 of a newer program"), "{error}");
    }
}

#[test]
fn current_boot_has_id() {
    let boot = ReservationFile::boot().unwrap();
    assert_ne!(boot, [0; 16]);
    assert_eq!(ReservationFile::boot().unwrap(), boot);
}
