//! Mutants are caught by tests that fail, and by nothing else.

use crate::{Workspace, printed};

const LIBRARY: &str = "
pub fn double(n: u32) -> u32 {
    n * 2
}

#[test]
fn doubles() {
    assert_eq!(double(2), 4);
}
";

/// `caught` changes what the test looks at, `survivor` does not, `broken` does not compile.
fn list() -> String {
    let mutant = |name: &str, replace: &str| {
        format!(
            "[[mutant]]\nname = \"{name}\"\nbreaks = \"doubling\"\nfile = \"src/lib.rs\"\n\
             find = \"n * 2\"\nreplace = \"{replace}\"\ntier = \"test\"\npackage = \"tiny\"\ntests = \"--lib\"\n"
        )
    };
    mutant("caught", "n * 3") + &mutant("survivor", "n + n") + &mutant("broken", "n *")
}

#[test]
fn mutant_is_caught_when_a_test_fails_and_not_when_it_does_not_compile() {
    let workspace = Workspace::new(LIBRARY);
    workspace.write("testing/harness/mutants.toml", &list());
    workspace.git(&["init", "--quiet"]);
    workspace.git(&["add", "."]);
    workspace.git(&["commit", "--quiet", "--message", "first"]);
    let run = workspace.tier(&["mutants", "caught"]);
    assert!(run.status.success(), "{}", printed(&run));
    let run = workspace.tier(&["mutants", "--seed", "any", "--draw", "3"]);
    let text = printed(&run);
    assert!(!run.status.success(), "{text}");
    let ends = |name: &str, end: &str| {
        let mut lines = text.lines().filter(|line| line.starts_with(name));
        lines.next().is_some_and(|line| line.ends_with(end))
    };
    assert!(ends("caught ", " doubles"), "{text}");
    assert!(ends("survivor ", "SURVIVED"), "{text}");
    assert!(ends("broken ", "NOT RUN"), "{text}");
}

#[test]
fn tests_that_fail_without_mutants_are_refused() {
    let workspace = Workspace::new(&LIBRARY.replace("4", "5"));
    workspace.write("testing/harness/mutants.toml", &list());
    workspace.git(&["init", "--quiet"]);
    workspace.git(&["add", "."]);
    workspace.git(&["commit", "--quiet", "--message", "first"]);
    let run = workspace.tier(&["mutants", "caught"]);
    let text = printed(&run);
    assert!(
        !run.status.success() && text.contains("fail without mutants"),
        "{text}"
    );
}
