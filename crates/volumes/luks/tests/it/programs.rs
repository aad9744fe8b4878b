//! Containers of the installed `qemu-img` and `cryptsetup`, which also read what was written here.

use crate::common::Disk;
use crate::container::{PASSPHRASE, noise};
use luks::{Header, HeaderVolume, LuksOptions, LuksVolume, unlock};
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use volume::{FileOptions, FileVolume, Volume};

/// Returns whether a program can be started; otherwise says that the test is skipped.
fn is_installed(program: &str) -> bool {
    let found = Command::new(program).arg("--version").output();
    if let Err(error) = found {
        let what = format!("luks::programs: {program}");
        testkit::skip(&what, format!("not installed: {}", error.kind()));
        return false;
    }
    true
}

fn run(program: &str, arguments: &[&str]) -> String {
    let done = Command::new(program).args(arguments).output().unwrap();
    let text = String::from_utf8_lossy(&done.stderr);
    assert!(done.status.success(), "{program} {arguments:?}: {text}");
    String::from_utf8_lossy(&done.stdout).into_owned()
}

fn opened(path: &Path) -> LuksVolume {
    let file = FileVolume::open(path, FileOptions::default()).unwrap();
    let file: Arc<dyn Volume> = Arc::new(file);
    let source = HeaderVolume(&*file);
    let header = Header::read(&source, false).unwrap();
    let key = unlock(&header, &source, PASSPHRASE).unwrap();
    LuksVolume::new(file.clone(), &header, &key, LuksOptions::default()).unwrap()
}

#[test]
fn data_is_exchanged_with_qemu_img() {
    if !is_installed("qemu-img") {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name).to_str().unwrap().to_owned();
    std::fs::write(path("key"), PASSPHRASE).unwrap();
    let secret = format!("secret,id=s,file={}", path("key"));
    let plain = noise(1, 3 << 20);
    std::fs::write(path("plain"), &plain).unwrap();
    for (cipher, hash) in [
        ("aes-128", "sha1"),
        ("aes-256", "sha256"),
        ("aes-256", "sha512"),
    ] {
        let (disk, back) = (path("disk"), path("back"));
        let options = format!(
            "key-secret=s,cipher-alg={cipher},cipher-mode=xts,ivgen-alg=plain64,hash-alg={hash},iter-time=10"
        );
        let source = path("plain");
        let convert = ["convert", "-O", "luks", "--object", &secret, "-o", &options];
        run("qemu-img", &[&convert[..], &[&source, &disk]].concat());
        let volume = opened(Path::new(&disk));
        let mut queue = Disk::new(&volume);
        assert!(
            queue.read(0, plain.len()).unwrap() == plain,
            "{cipher} {hash}"
        );
        let written = noise(2, 1 << 20);
        queue.write(1 << 20, &written, true).unwrap();
        drop((queue, volume));
        let image = format!("driver=luks,key-secret=s,file.filename={disk}");
        let convert = ["convert", "-O", "raw", "--object", &secret, "--image-opts"];
        run("qemu-img", &[&convert[..], &[&image, &back]].concat());
        let back = std::fs::read(&back).unwrap();
        assert!(back[..1 << 20] == plain[..1 << 20], "{cipher} {hash}");
        assert!(back[1 << 20..2 << 20] == written, "{cipher} {hash}");
        assert!(back[2 << 20..] == plain[2 << 20..], "{cipher} {hash}");
    }
}

/// Encryption and decryption of a whole file need neither device mapper nor privileges.
#[test]
fn data_is_exchanged_with_cryptsetup() {
    if !is_installed("cryptsetup") {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name).to_str().unwrap().to_owned();
    std::fs::write(path("key"), PASSPHRASE).unwrap();
    let plain = noise(1, 2 << 20);
    for (bits, sector, kdf) in [
        ("256", "512", "pbkdf2"),
        ("512", "512", "argon2i"),
        ("256", "4096", "argon2id"),
        ("512", "4096", "argon2id"),
    ] {
        let (disk, key, header) = (path("disk"), path("key"), path("header"));
        let mut bytes = plain.clone();
        bytes.resize(34 << 20, 0);
        std::fs::write(&disk, bytes).unwrap();
        let _ = std::fs::remove_file(&header);
        let mut derivation = vec!["--pbkdf", kdf, "--pbkdf-force-iterations"];
        derivation.extend(if kdf == "pbkdf2" {
            vec!["1000"]
        } else {
            vec!["4", "--pbkdf-memory", "64", "--pbkdf-parallel", "2"]
        });
        let encrypt = [
            "reencrypt",
            "--encrypt",
            "-q",
            "--type",
            "luks2",
            "--reduce-device-size",
            "32M",
            "--key-size",
            bits,
            "--sector-size",
            sector,
            "--key-file",
            &key,
            &disk,
        ];
        run("cryptsetup", &[&encrypt[..], &derivation].concat());
        let volume = opened(Path::new(&disk));
        assert_eq!(volume.info().block_size.to_string(), sector);
        let mut queue = Disk::new(&volume);
        assert!(
            queue.read(0, plain.len()).unwrap() == plain,
            "{bits} {sector}"
        );
        let written = noise(2, 1 << 20);
        queue.write(512 << 10, &written, true).unwrap();
        drop((queue, volume));
        let decrypt = [
            "reencrypt",
            "--decrypt",
            "-q",
            "--header",
            &header,
            "--key-file",
            &key,
        ];
        // A file in no device mapping is known to be unused.
        let offline = ["--force-offline-reencrypt", &disk];
        run("cryptsetup", &[&decrypt[..], &offline].concat());
        let mut expected = plain.clone();
        expected[512 << 10..][..1 << 20].copy_from_slice(&written);
        let back = std::fs::read(&disk).unwrap();
        assert!(back[..plain.len()] == expected, "{bits} {sector} {kdf}");
    }
}
