use super::*;
use crate::Kind;
use std::time::Duration;

fn open(url: &str) -> Result<Arc<dyn Volume>, OpenError> {
    open_url(url, OpenOptions::default())
}

fn error(url: &str) -> String {
    open(url).expect_err(url).to_string()
}

#[test]
fn memory_and_null_urls_open() {
    let volume = open("mem://1M").unwrap();
    assert_eq!(
        (volume.info().kind, volume.info().size),
        (Kind::Memory, 1 << 20)
    );
    let volume = open("null://1T?latency=6.4us&read-zeroes=on&read-only=on").unwrap();
    assert_eq!(
        (volume.info().kind, volume.info().size),
        (Kind::Null, 1 << 40)
    );
    assert!(volume.info().read_only);
    assert!(
        volume.info().description.contains("6.4"),
        "{}",
        volume.info().description
    );
    let read_only = OpenOptions {
        read_only: true,
        ..OpenOptions::default()
    };
    assert!(
        open_url("mem://1M?read-only=off", read_only)
            .unwrap()
            .info()
            .read_only
    );
}

#[test]
fn slice_urls_open() {
    let volume = open("null://1M?offset=64K&length=128K").unwrap();
    assert_eq!(volume.info().size, 128 << 10);
    assert_eq!(
        open("null://1M?offset=64K").unwrap().info().size,
        (1 << 20) - (64 << 10)
    );
    assert!(error("null://1M?offset=1M").contains("does not lie within"));
    assert!(error("null://1M?offset=64K&length=1M").contains("does not lie within"));
}

#[test]
fn errors_name_url_part() {
    assert!(error("").contains("no volume is named"));
    assert!(error("file://").contains("no volume is named"));
    let text = error("iscsi://host/1");
    assert!(
        text.contains("iscsi") && text.contains("mem://SIZE") && text.contains("null://SIZE"),
        "{text}"
    );
    let text = error("mem://");
    assert!(text.contains("whole number"), "{text}");
    let text = error("null://12Q");
    assert!(text.contains("12Q") && text.contains("unit"), "{text}");
    let text = error("null://1G?colour=red");
    assert!(
        text.contains("colour") && text.contains("latency"),
        "{text}"
    );
    let text = error("mem://1G?latency=1us");
    assert!(
        text.contains("latency") && text.contains("mem volumes have read-only"),
        "{text}"
    );
    let text = error("null://1G?latency=5");
    assert!(
        text.contains("latency=5") && text.contains("missing"),
        "{text}"
    );
    assert!(error("null://1G?latency").contains("key=value"));
    assert!(error("null://1G?latency=1us&latency=2us").contains("twice"));
    assert!(error("null://1G?read-only=maybe").contains("on or off"));
    assert!(error("null://0").contains("0 bytes"));
    assert!(
        error("mem://16383P").contains("address space") || error("mem://16383P").contains("memory")
    );
    assert!(error("/nonexistent/disk.raw").contains("truncate -s"));
    assert!(error("file:///a%2").contains("hexadecimal"));
    assert!(error("file:///a%00b").contains("hexadecimal"));
}

#[test]
fn files_open_by_path_and_url() {
    let directory = tempfile::tempdir().unwrap();
    let file = |name: &str, size: u64| {
        let path = directory.path().join(name);
        std::fs::File::create(&path).unwrap().set_len(size).unwrap();
        path.to_str().unwrap().to_owned()
    };
    let plain = file("disk.raw", 1 << 20);
    assert_eq!(open(&plain).unwrap().info().size, 1 << 20);
    assert_eq!(
        open(&format!("file://{plain}?direct=off&read-only=on"))
            .unwrap()
            .info()
            .size,
        1 << 20
    );
    assert!(error(&format!("{plain}?direct=perhaps")).contains("auto, on or off"));
    let odd = file("what?.raw", 2 << 20);
    assert_eq!(open(&odd).unwrap().info().size, 2 << 20);
    let spaced = file("two words", 3 << 20);
    assert_eq!(
        open(&format!("file://{}", spaced.replace(' ', "%20")))
            .unwrap()
            .info()
            .size,
        3 << 20
    );
    // A file is the same volume by any name.
    let dotted = directory.path().join(".").join("disk.raw");
    let id = open(&plain).unwrap().id();
    assert_eq!(id, open(dotted.to_str().unwrap()).unwrap().id());
}

/// Creates a file of `mib` MiB, which is kept as long as the directory.
fn image(directory: &tempfile::TempDir, name: &str, mib: u64) -> String {
    let path = directory.path().join(name);
    let file = std::fs::File::create(&path).unwrap();
    file.set_len(mib << 20).unwrap();
    path.to_str().unwrap().to_owned()
}

#[test]
fn slices_of_same_file_open_together() {
    let directory = tempfile::tempdir().unwrap();
    let disk = image(&directory, "parts.raw", 8);
    // The very beginning, where all parts have a shared lock, and the end.
    let parts = [
        "offset=0&length=4K",
        "offset=4K&length=1M",
        "offset=2M&length=2M",
        "offset=4M",
    ];
    let open_all: Vec<_> = parts
        .iter()
        .map(|part| open(&format!("{disk}?{part}")).unwrap())
        .collect();
    assert_eq!(open_all[3].info().size, 4 << 20);
    let text = error(&format!("{disk}?offset=3M&length=2M"));
    assert!(
        text.contains("offset=3M&length=2M overlaps")
            && text.contains("?offset=2M&length=2M, which is in use"),
        "{text}"
    );
    assert!(text.contains("bytes 3145728 to 4194303"), "{text}");
    // All of it is taken as soon as a part of it is, and the other way round; by another name, too.
    assert!(error(&disk).contains("overlaps"));
    let link = directory.path().join("link");
    std::os::unix::fs::symlink(&disk, &link).unwrap();
    assert!(
        error(&format!("{}?offset=5M&length=4K", link.display())).contains("parts.raw?offset=4M")
    );
    assert!(error(&format!("{disk}?offset=5M&length=4K&read-only=on")).contains("overlaps"));
    drop(open_all);
    let whole = open(&disk).unwrap();
    assert!(
        error(&format!("{disk}?offset=5M&length=4K")).contains("all bytes")
            || error(&format!("{disk}?offset=5M&length=4K")).contains("bytes 5242880")
    );
    drop(whole);
    let readers: Vec<_> = ["", "&offset=1M&length=2M", "&offset=2M"]
        .iter()
        .map(|part| open(&format!("{disk}?read-only=on{part}")).unwrap())
        .collect();
    assert!(error(&format!("{disk}?offset=1M&length=4K")).contains("overlaps"));
    drop(readers);
    // Memory of one volume is in no other.
    let _both = (open("mem://1M").unwrap(), open("mem://1M").unwrap());
    // Without locks, the user is responsible.
    let _both = (
        open(&format!("{disk}?lock=off")).unwrap(),
        open(&format!("{disk}?lock=off")).unwrap(),
    );
}

#[test]
fn slice_locks_exclude_other_openings() {
    let directory = tempfile::tempdir().unwrap();
    let disk = image(&directory, "locked.raw", 8);
    // Past the names: as another process does it.
    let whole = || FileVolume::open(&disk, FileOptions::default());
    let part = |offset, len, read_only| {
        // The holder is this process itself, which is not looked for in a part: the opening would
        // wait as for a process that had ended.
        let previous = PreviousProcess {
            limit: Duration::from_millis(50),
            ..PreviousProcess::default()
        };
        let options = FileOptions {
            read_only,
            previous,
            ..FileOptions::default()
        };
        let volume = FileVolume::open_unlocked(&disk, options).unwrap();
        volume.lock(offset, len).map(|()| volume)
    };
    let first = part(0, Some(1 << 20), false).unwrap();
    assert!(whole().is_err(), "all of a file of which a part is used");
    let second = part(1 << 20, None, false).unwrap();
    assert!(part((1 << 20) - 512, Some(512), false).is_err());
    assert!(
        part(7 << 20, Some(512), true).is_err(),
        "a reader in a writer's part"
    );
    drop((first, second));
    let readers = (
        part(0, Some(4096), true).unwrap(),
        part(0, None, true).unwrap(),
    );
    assert!(part(512, Some(4096), false).is_err());
    drop(readers);
    let all = whole().unwrap();
    assert!(part(1 << 20, Some(512), false).is_err());
    drop(all);
    whole().unwrap();
}

#[test]
fn partition_urls_open() {
    let directory = tempfile::tempdir().unwrap();
    let disk = image(&directory, "gpt.raw", 8);
    let text = error(&format!("{disk}?partition=1"));
    assert!(
        text.contains("gpt.raw?partition=1") && text.contains("not a boot record"),
        "{text}"
    );
    assert!(error("null://1M?partition=0").contains("from 1"));
    assert!(error("null://1M?partition=boot").contains("partlabel="));
    assert!(error("null://1M?partlabel=a%2").contains("hexadecimal"));
    assert!(error("null://1M?partuuid=123").contains("8-4-4-4-12"));
    assert!(error("null://1M?partition=1&partlabel=a").contains("one of"));
    assert!(error("null://1M?offset=1&offset=2").contains("twice"));
    let (rest, extras) =
        Extras::split("nvme://0000:44:00.0/1?depth=4&partlabel=a%26b&read-only=on&offset=1M")
            .unwrap();
    assert_eq!(rest, "nvme://0000:44:00.0/1?depth=4&read-only=on");
    assert!(extras.is_part());
    assert_eq!(
        Extras::split("vfio-user:///a/1?length=1M").unwrap().0,
        "vfio-user:///a/1"
    );
}
