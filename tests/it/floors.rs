//! Who may know of whom: words, then lease and fence, which do not know each other.

use std::path::{Path, PathBuf};

/// Every source file below `src`, with its text. Comments are left out, since
/// documentation may point anywhere, and so are imports for documentation alone.
fn sources() -> Vec<(PathBuf, String)> {
    fn collect(folder: &Path, into: &mut Vec<(PathBuf, String)>) {
        for entry in std::fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                collect(&path, into);
            } else if path.extension().is_some_and(|extension| extension == "rs") {
                let text = std::fs::read_to_string(&path).unwrap();
                let code = text.lines().filter(|line| !line.trim_start().starts_with("//"));
                into.push((path, code.collect::<Vec<_>>().join("\n")));
            }
        }
    }
    let mut sources = Vec::new();
    collect(&Path::new(env!("CARGO_MANIFEST_DIR")).join("src"), &mut sources);
    sources
}

#[test]
fn lease_and_fence_do_not_know_each_other_and_the_words_know_neither() {
    let sources = sources();
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let mut floors = [0; 3];
    for (path, code) in &sources {
        let path = path.strip_prefix(&root).unwrap();
        let (floor, forbidden): (usize, &[&str]) = if path.starts_with("lease") {
            (1, &["fence::"])
        } else if path.starts_with("fence") {
            (2, &["lease::", "redis::"])
        } else if path == Path::new("lib.rs") {
            continue;
        } else {
            (0, &["fence::", "lease::", "sqlx", "redis::"])
        };
        floors[floor] += 1;
        for word in forbidden {
            assert!(!code.contains(word), "{} knows of {word}", path.display());
        }
    }
    assert!(floors.iter().all(|files| *files >= 5), "the floors have moved: {floors:?}");
}
