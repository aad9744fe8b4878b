use super::*;
use crate::Kind;

fn open(url: &str) -> Result<Arc<dyn Volume>, OpenError> {
    open_url(url, OpenOptions::default())
}

fn error(url: &str) -> String {
    open(url).expect_err(url).to_string()
}

#[test]
fn memory_and_null() {
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
fn parts() {
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
fn errors_name_the_part() {
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
fn files_by_path_and_by_url() {
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
    // The same file is the same volume, by whatever name.
    let dotted = directory.path().join(".").join("disk.raw");
    let id = open(&plain).unwrap().id();
    assert_eq!(id, open(dotted.to_str().unwrap()).unwrap().id());
}
