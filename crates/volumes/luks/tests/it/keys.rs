//! Sources of passphrases.

use luks::{KeySource, LuksError};
use rustix::fs::{CWD, FileType, Mode, mknodat};
use std::fs::{Permissions, set_permissions};
use std::os::unix::fs::PermissionsExt;

fn source(text: &str) -> KeySource {
    KeySource::parse(text).unwrap()
}

#[test]
fn whole_file_is_the_passphrase() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("key");
    let source = source(path.to_str().unwrap());
    let why = |source: &KeySource| source.read().expect_err("refused").to_string();
    assert!(why(&source).contains("No such file"));
    std::fs::write(&path, b"two\nlines\n").unwrap();
    set_permissions(&path, Permissions::from_mode(0o640)).unwrap();
    source.check().unwrap();
    assert_eq!(*source.read().unwrap(), *b"two\nlines\n");
    set_permissions(&path, Permissions::from_mode(0o604)).unwrap();
    assert!(why(&source).contains("chmod 600"));
    assert!(matches!(source.check(), Err(LuksError::Key { .. })));
    set_permissions(&path, Permissions::from_mode(0o600)).unwrap();
    std::fs::write(&path, b"").unwrap();
    assert!(why(&source).contains("empty"));
    std::fs::write(&path, vec![1; (8 << 20) + 1]).unwrap();
    assert!(why(&source).contains("8 MiB"));
    assert!(why(&self::source(dir.path().to_str().unwrap())).contains("neither"));
}

#[test]
fn pipe_is_read_until_its_writer_closes_it() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("pipe");
    mknodat(CWD, &path, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).unwrap();
    let source = source(path.to_str().unwrap());
    // Without a writer, a check reads nothing and does not wait.
    source.check().unwrap();
    std::thread::scope(|scope| {
        let reader = scope.spawn(|| source.read().unwrap());
        std::fs::write(&path, vec![7; 100_000]).unwrap();
        assert_eq!(*reader.join().unwrap(), vec![7; 100_000]);
    });
}

#[test]
fn credential_names_are_no_paths() {
    for text in ["", "cred:", "cred:..", "cred:a/b"] {
        assert!(KeySource::parse(text).is_err(), "{text}");
    }
    assert_eq!(source("cred:disk").to_string(), "cred:disk");
    // This process is no service.
    let error = source("cred:disk").read().expect_err("no credentials");
    assert!(error.to_string().contains("LoadCredential="), "{error}");
}
