// A test is a sentence and a body. A failed check is reported and counted, and the test goes on.
//
//   TEST(A row does not depend on the order of keys) { CHECK_EQ(1 + 1, 2); }
//   TEST_MAIN()
//
// The program runs all tests, or with an argument those whose sentence contains it.
#pragma once

#include <cmath>
#include <cstdio>
#include <cstring>
#include <exception>
#include <iostream>
#include <sstream>
#include <string>
#include <type_traits>
#include <vector>

namespace check {

struct Test {
  const char* sentence;
  void (*body)();
};

inline std::vector<Test>& Tests() {
  static std::vector<Test> tests;
  return tests;
}

inline int& Failures() {
  static int failures = 0;
  return failures;
}

struct Registration {
  Registration(const char* sentence, void (*body)()) { Tests().push_back({sentence, body}); }
};

inline void Fail(const char* file, int line, const std::string& what) {
  std::cerr << file << ":" << line << ": " << what << "\n";
  ++Failures();
}

template <class T>
std::string Text(const T& value) {
  std::ostringstream out;
  out.precision(17);
  if constexpr (std::is_enum_v<T>) {
    out << +static_cast<std::underlying_type_t<T>>(value);
  } else {
    out << value;
  }
  return out.str();
}

template <class A, class B>
void Equal(const char* file, int line, const char* text, const A& a, const B& b) {
  if (!(a == b)) Fail(file, line, std::string(text) + ": " + Text(a) + " != " + Text(b));
}

// Fails for NaN on either side.
inline void Near(const char* file, int line, const char* text, double a, double b, double bound) {
  if (std::abs(a - b) <= bound) return;
  Fail(file, line,
       std::string(text) + ": " + Text(a) + " vs " + Text(b) + ", bound " + Text(bound));
}

template <class Error, class Body>
void Throws(const char* file, int line, const char* text, const std::string& part, Body&& body) {
  try {
    body();
  } catch (const Error& error) {
    if (std::string(error.what()).find(part) == std::string::npos) {
      Fail(file, line, std::string(text) + " says \"" + error.what() + "\", not \"" + part + "\"");
    }
    return;
  } catch (...) {
    return Fail(file, line, std::string(text) + " threw another type");
  }
  Fail(file, line, std::string(text) + " did not throw");
}

inline int RunAll(const char* filter) {
  int run = 0, failed = 0;
  for (const Test& test : Tests()) {
    if (filter != nullptr && std::strstr(test.sentence, filter) == nullptr) continue;
    const int before = Failures();
    try {
      test.body();
    } catch (const std::exception& error) {
      Fail(test.sentence, 0, std::string("threw: ") + error.what());
    }
    const bool ok = Failures() == before;
    std::cout << (ok ? "ok      " : "FAILED  ") << test.sentence << "\n";
    ++run;
    failed += !ok;
  }
  std::cout << run - failed << " of " << run << " passed\n";
  return failed == 0 && run > 0 ? 0 : 1;
}

}  // namespace check

#define CHECK_JOIN_(a, b) a##b
#define CHECK_JOIN(a, b) CHECK_JOIN_(a, b)
#define TEST_(id, ...)                                                                     \
  static void CHECK_JOIN(TestBody, id)();                                                  \
  static const check::Registration CHECK_JOIN(registration, id)(#__VA_ARGS__,              \
                                                                CHECK_JOIN(TestBody, id)); \
  static void CHECK_JOIN(TestBody, id)()
#define TEST(...) TEST_(__COUNTER__, __VA_ARGS__)
#define TEST_MAIN() \
  int main(int argc, char** argv) { return check::RunAll(argc > 1 ? argv[1] : nullptr); }

#define CHECK(...)                                                     \
  do {                                                                 \
    if (!(__VA_ARGS__)) check::Fail(__FILE__, __LINE__, #__VA_ARGS__); \
  } while (0)
#define CHECK_EQ(a, b) check::Equal(__FILE__, __LINE__, #a " == " #b, (a), (b))
#define CHECK_NEAR(a, b, bound) check::Near(__FILE__, __LINE__, #a " ~ " #b, (a), (b), (bound))
// The statement throws Error, and its message contains `part`.
#define CHECK_THROWS(Error, part, ...) \
  check::Throws<Error>(__FILE__, __LINE__, #__VA_ARGS__, part, [&] { __VA_ARGS__; })
